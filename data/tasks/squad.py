"""SQuAD 1.1 and 2.0: windows over long texts, the best span over them, and questions without an answer.

Rajpurkar et al. 2016 (arXiv 1606.05250) and 2018 (arXiv 1806.03822); windows and spans as Devlin et al. 2018,
section 4.2 and 4.3. A window is [CLS] question [SEP] part of the context [SEP]; the next begins
`task.doc_stride` tokens later. Where a window lacks the answer, both of its labels are [CLS].
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from data.tasks.choices import SplitScores
from data.tasks.records import WrongRecord, text_of
from recipes.schema import Recipe
from recipes.tasks import TaskFacts

CHUNK = 1000  # texts to tokenize at once
_Offsets = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class SquadQuestion:
    """A question about a text. `answers`: (text, index of its first character); None: they are hidden."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None


@dataclass(frozen=True)
class SquadWindow:
    """Tokens `start` to `stop` of the context of question `of`, at `place` in the sample."""

    of: int
    start: int
    stop: int
    place: int


@dataclass(frozen=True)
class Windows:
    """All windows of some questions. `offsets`: for each question, the characters of its context's tokens."""

    samples: Dataset
    windows: tuple[SquadWindow, ...]
    offsets: tuple[_Offsets, ...]


def parse(
    facts: TaskFacts, record: dict[str, Any], number: int, labelled: bool
) -> SquadQuestion:
    """Make a question of a record in the hub's schema. Raises WrongRecord."""
    question, context = (text_of(record, name, labelled) for name in facts.texts)
    answers = _answers(record.get(facts.label), context)
    if labelled and answers is None:
        raise WrongRecord("answers are missing")
    if labelled and not answers and facts.hub[0].endswith("/squad"):
        raise WrongRecord("it has no answer, which only SQuAD 2.0 knows")
    return SquadQuestion(str(record.get("id", number)), question, context, answers)


def _answers(value: Any, context: str) -> tuple[tuple[str, int], ...] | None:
    if value is None:
        return None
    if isinstance(value, list):  # as SQuAD's own JSON has them
        texts = [answer.get("text") for answer in value]
        starts = [answer.get("answer_start") for answer in value]
        value = {"text": texts, "answer_start": starts}
    try:
        pairs = tuple(zip(value["text"], value["answer_start"], strict=True))
        sound = all(
            isinstance(text, str) and type(start) is int for text, start in pairs[:1]
        )
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise WrongRecord("answers are no texts with an answer_start each")
    for text, start in pairs[:1]:
        if start < 0 or context[start : start + len(text)] != text:
            raise WrongRecord(
                f"its answer {text[:40]!r} is not at character {start} of the context"
            )
    return pairs


def windows_of(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[SquadQuestion],
) -> Windows:
    """Cut the contexts of questions into windows, with labels."""
    task = recipe.task
    length = recipe.sequence_length
    assert task is not None
    columns: dict[str, list[Any]] = defaultdict(list)
    windows = list[SquadWindow]()
    every: list[_Offsets] = []
    cls = tokenizer.cls_token_id
    sep = tokenizer.sep_token_id
    for first in range(0, len(questions), CHUNK):
        chunk = questions[first : first + CHUNK]
        how: dict[str, Any] = dict(
            add_special_tokens=False, return_token_type_ids=False, verbose=False
        )
        asked = tokenizer([each.question for each in chunk], **how)["input_ids"]
        texts = tokenizer(
            [each.context for each in chunk], return_offsets_mapping=True, **how
        )
        found = zip(
            chunk, asked, texts["input_ids"], texts["offset_mapping"], strict=True
        )
        for of, (question, query, tokens, offsets) in enumerate(found, first):
            query = query[: task.max_query]
            room = length - len(query) - 3
            place = len(query) + 2
            span = _token_span(question, offsets)
            every.append(offsets)
            for start in range(
                0, max(1, len(tokens) - room + task.doc_stride), task.doc_stride
            ):
                stop = min(start + room, len(tokens))
                ids = [cls, *query, sep, *tokens[start:stop], sep]
                columns["input_ids"].append(ids)
                columns["token_type_ids"].append([0] * place + [1] * (len(ids) - place))
                columns["attention_mask"].append([1] * len(ids))
                windows.append(SquadWindow(of, start, stop, place))
                first_token = last_token = 0  # [CLS]: the answer is not in the window
                if span is not None and start <= span[0] and span[1] < stop:
                    shift = place - start
                    first_token = span[0] + shift
                    last_token = span[1] + shift
                columns["start_positions"].append(first_token)
                columns["end_positions"].append(last_token)
    return Windows(Dataset.from_dict(columns), tuple(windows), tuple(every))


def _token_span(question: SquadQuestion, offsets: _Offsets) -> tuple[int, int] | None:
    """Return the first and last token of the first answer; None without an answer."""
    if not question.answers:
        return None
    text, start = question.answers[0]
    end = start + len(text)
    touched = [
        i for i, (first, stop) in enumerate(offsets) if first < end and stop > start
    ]
    return (touched[0], touched[-1]) if touched else None


def training(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[SquadQuestion],
) -> Dataset:
    return windows_of(recipe, tokenizer, questions).samples


def predicted(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    split: str,
    questions: Sequence[SquadQuestion],
) -> tuple[Dataset, Callable[[np.ndarray, SplitScores | None], SplitScores]]:
    """Return samples to predict, and a function to score their logits (windows, S, 2)."""
    made = windows_of(recipe, tokenizer, questions)
    task = recipe.task
    assert task is not None

    def score(logits: np.ndarray, dev: SplitScores | None) -> SplitScores:
        spans = best_spans(made, questions, logits, task.max_answer)
        return score_spans(spans, questions, with_none=task.name == "squad2", dev=dev)

    return made.samples, score


@dataclass(frozen=True)
class Span:
    """The best answer to a question; `no_answer`: excess of the logits for no answer over its own."""

    text: str
    no_answer: float


def best_spans(
    made: Windows, questions: Sequence[SquadQuestion], logits: np.ndarray, longest: int
) -> list[Span]:
    """Choose for each question the span with the largest sum of its two logits, over all windows.

    The sum for no answer is [CLS]'s, the smallest of the windows, since one window with an answer is enough.
    """
    best: list[tuple[float, int, int]] = [(-np.inf, 0, -1)] * len(questions)
    nothing = np.full(len(questions), np.inf)
    for window, of_window in zip(made.windows, logits.astype(np.float64), strict=True):
        nothing[window.of] = min(nothing[window.of], of_window[0].sum())
        count = window.stop - window.start
        if not count:
            continue
        starts, ends = of_window[window.place : window.place + count].T
        padded = np.pad(ends, (0, longest - 1), constant_values=-np.inf)
        sums = starts[:, None] + np.lib.stride_tricks.sliding_window_view(
            padded, longest
        )
        start, more = divmod(int(sums.argmax()), longest)
        found = (
            float(sums[start, more]),
            window.start + start,
            window.start + start + more,
        )
        if found[0] > best[window.of][0]:
            best[window.of] = found
    spans = []
    for question, offsets, (score, start, end), none in zip(
        questions, made.offsets, best, nothing, strict=True
    ):
        text = question.context[offsets[start][0] : offsets[end][1]] if end >= 0 else ""
        lead = float(none - score) if np.isfinite(score) else 0.0  # of no answer
        spans.append(Span(text, lead))
    return spans


def score_spans(
    spans: Sequence[Span],
    questions: Sequence[SquadQuestion],
    *,
    with_none: bool,
    dev: SplitScores | None,
) -> SplitScores:
    """Compute exact match and F1, and write SQuAD's prediction file.

    `with_none`: SQuAD 2.0; its threshold for no answer is tuned for F1 on the first scored split.
    """
    known = [
        row for row, question in enumerate(questions) if question.answers is not None
    ]
    metrics: dict[str, float] = {}
    texts = [span.text for span in spans]

    def scores(texts: Sequence[str]) -> list[AnswerScore]:
        found = []
        for row in known:
            right = [text for text, _ in questions[row].answers or ()]
            found.append(score_answer(texts[row], right, with_none))
        return found

    if with_none:
        odds = [span.no_answer for span in spans]
        if dev is None and known:
            threshold = best_threshold(scores(texts), [odds[row] for row in known])
        else:
            threshold = (dev.metrics if dev else {}).get("no_answer_threshold", 0.0)
        texts = [
            "" if odd > threshold else text
            for text, odd in zip(texts, odds, strict=True)
        ]
        metrics["no_answer_threshold"] = threshold
    if known:
        metrics = {**means(scores(texts)), **metrics}
    ids = [question.id for question in questions]
    files = {"predictions.json": _json(dict(zip(ids, texts, strict=True)))}
    if with_none:
        files["null_odds.json"] = _json(dict(zip(ids, odds, strict=True)))
    return SplitScores(metrics, files)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)


@dataclass(frozen=True)
class AnswerScore:
    """The scores of one answer. `answerable`: the question has an answer; `empty`: the model gave none."""

    exact: float
    f1: float
    answerable: bool
    empty: bool


def normalise(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score_answer(text: str, answers: Sequence[str], with_none: bool) -> AnswerScore:
    """Score an answer against the annotators' `answers`.

    `with_none`: SQuAD 2.0, whose script drops answers without text when normalised. That of 1.1 keeps them,
    and gives no F1 for them.
    """
    right = list(map(normalise, answers))
    if with_none:
        right = [each for each in right if each] or [""]
    said = normalise(text)
    f1 = max(
        (_f1(said.split(), each.split(), with_none) for each in right), default=0.0
    )
    return AnswerScore(float(said in right), f1, bool(answers), not text)


def _f1(said: Sequence[str], right: Sequence[str], with_none: bool) -> float:
    if not said or not right:
        return float(with_none and said == right)
    common = (Counter(said) & Counter(right)).total()
    if not common:
        return 0.0
    precision = common / len(said)
    recall = common / len(right)
    return 2 * precision * recall / (precision + recall)


def means(every: Sequence[AnswerScore]) -> dict[str, float]:
    """Average the scores over all questions, and if there are both kinds, over each kind."""
    answerable = [each for each in every if each.answerable]
    others = [each for each in every if not each.answerable]
    parts = {"": every}
    if answerable and others:
        parts |= {"has_answer_": answerable, "no_answer_": others}
    found = {}
    for prefix, part in parts.items():
        found[f"{prefix}exact"] = sum(each.exact for each in part) / len(part)
        found[f"{prefix}f1"] = sum(each.f1 for each in part) / len(part)
    return found


def best_threshold(answered: Sequence[AnswerScore], odds: Sequence[float]) -> float:
    """Return the threshold of the best F1: odds above it mean no answer. It is one of `odds`, or below all.

    answered: scores of the best spans; odds: of no answer, for each.
    """
    best = float(sum(not each.answerable for each in answered))
    threshold = min(odds) - 1.0
    value = best
    order = sorted(range(len(odds)), key=lambda i: odds[i])
    for place, i in enumerate(order):
        # An answer instead of none: it wins its F1, or loses the point of an unanswerable question.
        value += (
            answered[i].f1 if answered[i].answerable else float(answered[i].empty) - 1.0
        )
        last_of_equals = place + 1 == len(order) or odds[order[place + 1]] > odds[i]
        if last_of_equals and value > best:
            best = value
            threshold = odds[i]
    return threshold
