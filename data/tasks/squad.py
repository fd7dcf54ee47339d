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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from data.tasks.choices import SplitScores
from data.tasks.records import Split, task_of
from recipes.schema import Recipe

NOWHERE = (0, 0)  # characters of a token that is not of the context


def encode(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    batch: Mapping[str, Any],
    rows: list[int],
) -> dict[str, Any]:
    """Cut the contexts of questions into windows, with labels.

    Besides: "row" of the question, and "characters" of the context that each token covers, else NOWHERE.
    """
    task = task_of(recipe)
    made: dict[str, list[Any]] = defaultdict(list)
    how: dict[str, Any] = dict(add_special_tokens=False, verbose=False)
    queries = tokenizer([text or "" for text in batch["question"]], **how)["input_ids"]
    contexts = [text or "" for text in batch["context"]]
    texts = tokenizer(contexts, return_offsets_mapping=True, **how)
    columns = (texts["input_ids"], texts["offset_mapping"], batch["label"])
    for row, query, tokens, places, label in zip(rows, queries, *columns, strict=True):
        before = [
            tokenizer.cls_token_id,
            *query[: task.max_query],
            tokenizer.sep_token_id,
        ]
        room = recipe.sequence_length - len(before) - 1
        answer = _tokens_of_answer(label, places)
        windows = range(
            0, max(1, len(tokens) - room + task.doc_stride), task.doc_stride
        )
        for start in windows:
            part = slice(start, start + room)
            ids = [*before, *tokens[part], tokenizer.sep_token_id]
            after = len(ids) - len(before)
            inside = answer and start <= answer[0] and answer[-1] < start + room
            shift = len(before) - start
            made["input_ids"].append(ids)
            made["token_type_ids"].append([0] * len(before) + [1] * after)
            made["attention_mask"].append([1] * len(ids))
            made["start_positions"].append(answer[0] + shift if inside else 0)
            made["end_positions"].append(answer[-1] + shift if inside else 0)
            made["row"].append(row)
            own = [NOWHERE] * len(before) + places[part]
            made["characters"].append([*own, NOWHERE])
    return made


def _tokens_of_answer(
    label: Mapping[str, Any] | None, places: Sequence[tuple[int, int]]
) -> list[int]:
    """Return the tokens of the first answer; [] without one."""
    if not label or not label["text"]:
        return []
    start = label["answer_start"][0]
    end = start + len(label["text"][0])
    return [i for i, (begin, stop) in enumerate(places) if begin < end and stop > start]


def best_spans(
    records: Dataset, samples: Dataset, logits: np.ndarray, longest: int
) -> tuple[list[str], np.ndarray]:
    """Choose for each question the span of at most `longest` tokens with the largest sum of its two logits.

    `logits`: (windows, S, 2). The sum for no answer is [CLS]'s, the smallest of the windows, since one window
    with an answer is enough. Return the texts, and the excess (n,) of the sum for no answer over theirs.
    """
    count = len(records)
    best = np.full(count, -np.inf)
    nothing = np.full(count, np.inf)
    spans = [NOWHERE] * count
    length = logits.shape[1]
    allowed = np.tril(np.triu(np.ones((length, length), bool)), longest - 1)
    windows = zip(samples["row"], samples["characters"], logits, strict=True)
    for row, characters, values in windows:
        own = values[: len(characters)].astype(np.float64)
        nothing[row] = min(nothing[row], own[0].sum())
        inside = np.array(characters)[:, 1] > 0
        starts, ends = np.where(inside[:, None], own, -np.inf).T
        size = len(own)
        sums = np.where(allowed[:size, :size], starts[:, None] + ends, -np.inf)
        start, end = np.unravel_index(sums.argmax(), sums.shape)
        if sums[start, end] > best[row]:
            best[row] = sums[start, end]
            spans[row] = (characters[start][0], characters[end][1])
    contexts = records["context"]
    texts = [
        (text or "")[slice(*span)] for text, span in zip(contexts, spans, strict=True)
    ]
    return texts, np.where(np.isfinite(best), nothing - best, 0.0)


def score(
    recipe: Recipe,
    split: Split,
    samples: Dataset,
    logits: np.ndarray,
    dev: SplitScores | None,
) -> SplitScores:
    """Compute exact match and F1, and write SQuAD's prediction file.

    SQuAD 2.0's threshold for no answer is tuned for F1 on the first split, `dev`.
    """
    task = task_of(recipe)
    texts, odds = best_spans(split.records, samples, logits, task.max_answer)
    return score_texts(texts, odds, split.records, dev, with_none=task.name == "squad2")


def score_texts(
    texts: Sequence[str],
    odds: np.ndarray,
    records: Dataset,
    dev: SplitScores | None,
    *,
    with_none: bool,
) -> SplitScores:
    """Score answers; `odds`: of no answer, which SQuAD 2.0 has (`with_none`)."""
    ids = records["id"]
    answers = [label and label["text"] for label in records["label"]]
    metrics = dict[str, float]()
    files = dict[str, str]()
    if with_none:
        if dev is None:
            threshold = best_threshold(score_answers(texts, answers, True), odds)
        else:
            threshold = dev.metrics["no_answer_threshold"]
        pairs = zip(texts, odds, strict=True)
        texts = ["" if odd > threshold else text for text, odd in pairs]
        metrics["no_answer_threshold"] = threshold
        files["null_odds.json"] = _json(ids, odds.tolist())
    scores = score_answers(texts, answers, with_none)
    if len(scores):
        metrics = means(scores) | metrics
    return SplitScores(metrics, {"predictions.json": _json(ids, texts), **files})


def _json(ids: Sequence[str], values: Sequence[Any]) -> str:
    table = dict(zip(ids, values, strict=True))
    return json.dumps(table, ensure_ascii=False, indent=1) + "\n"


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)


def normalise(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def score_answers(
    texts: Sequence[str], answers: Sequence[Sequence[str] | None], with_none: bool
) -> np.ndarray:
    """Return (n, 4) for all questions whose answers are known: exact match, F1, has answers, is answered.

    `with_none`: SQuAD 2.0, whose script drops answers without text when normalised. That of 1.1 keeps them,
    and gives no F1 for them.
    """
    rows = []
    for text, given in zip(texts, answers, strict=True):
        if given is None:
            continue
        right = [normalise(each) for each in given]
        if with_none:
            right = [each for each in right if each] or [""]
        said = normalise(text)
        shares = [_f1(said.split(), each.split(), with_none) for each in right]
        rows.append((said in right, max(shares, default=0), bool(given), bool(text)))
    return np.array(rows, float).reshape(-1, 4)


def _f1(said: Sequence[str], right: Sequence[str], with_none: bool) -> float:
    if not said or not right:
        return float(with_none and said == right)
    return 2 * (Counter(said) & Counter(right)).total() / (len(said) + len(right))


def means(scores: np.ndarray) -> dict[str, float]:
    """Average scores over all questions, and if there are both kinds, over those with and without answers."""
    answerable = scores[:, 2] > 0
    parts = {"": scores}
    if answerable.any() and not answerable.all():
        parts |= {"has_answer_": scores[answerable], "no_answer_": scores[~answerable]}
    mean = {}
    for prefix, part in parts.items():
        mean[f"{prefix}exact"], mean[f"{prefix}f1"] = part[:, :2].mean(0).tolist()
    return mean


def best_threshold(scores: np.ndarray, odds: np.ndarray) -> float:
    """Return the threshold of the best F1: odds above it mean no answer. It is one of `odds`, or below all.

    `scores`: of the best spans; `odds`: of no answer, for each.
    """
    _, f1, answerable, answered = scores.T
    order = np.argsort(odds, kind="stable")
    # an answer instead of none wins its F1, or loses the point of an unanswerable question
    gains = np.where(answerable > 0, f1, -answered)[order]
    totals = np.cumsum([len(scores) - answerable.sum(), *gains])
    limits = np.array([odds.min() - 1, *odds[order]])
    last_of_equals = np.append(np.diff(limits) > 0, True)
    totals[~last_of_equals] = -np.inf
    return float(limits[totals.argmax()])
