"""SQuAD: its metrics to the digit, windows that cover every token, the best span over them, its threshold."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from tasked import VOCABULARY, WORDS
from transformers import BertTokenizer

from data.tasks.choices import SplitScores
from data.tasks.records import WrongRecord
from data.tasks.squad import (
    Span,
    SquadQuestion,
    best_spans,
    best_threshold,
    means,
    parse,
    score_answer,
    score_spans,
    windows_of,
)
from recipes.schema import Recipe
from recipes.tasks import TASKS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n")
    return BertTokenizer(vocab=str(path))


def recipe(name="squad1", length=24, stride=5, longest=4) -> Recipe:
    return Recipe.model_validate(dict(
        title="test", sequence_length=length, steps=10, batch={"global": 4}, optimizer={"lr": 1e-3},
        model=dict(family="bert", layers=2, hidden=32, heads=4, vocab_size=len(VOCABULARY), task_head="span"),
        data={"tokenizer": {"kind": "trained_wordpiece"}},
        task=dict(name=name, doc_stride=stride, max_query=6, max_answer=longest),
    ))  # fmt: skip


def drawn(count: int, seed: int = 0) -> list[SquadQuestion]:
    """Questions about texts of very different lengths, every third without an answer."""
    chosen, found = random.Random(seed), []
    for number in range(count):
        words = chosen.choices(WORDS, k=chosen.choice([1, 3, 12, 19, 20, 40]))
        context, at = " ".join(words), chosen.randrange(len(words))
        start = len(" ".join(words[:at])) + (at > 0)
        answers = ((words[at], start),) if number % 3 else ()
        query = " ".join(chosen.choices(WORDS, k=chosen.randint(1, 9)))
        found.append(SquadQuestion(str(number), query, context, answers))
    return found


def said_and_right() -> tuple[list[str], list[list[str]], list[float]]:
    """Answers that are right, nearly right and wrong; answers of annotators; odds of no answer."""
    chosen, said, right, odds = random.Random(7), [], [], []
    pieces = ["The", "an", "old", "Cat,", "cat", "a", "--", "(sat)", "U.S.", "naïve", "2.0", "on"]

    def text(least: int) -> str:
        return " ".join(chosen.choices(pieces, k=chosen.randint(least, 4)))

    for _ in range(300):
        answers, mode = [f"{text(0)} mat" for _ in range(chosen.randint(0, 3))], chosen.random()
        own = answers[0] if answers and mode < 0.3 else text(0)
        said.append(own.upper() if mode < 0.1 else own)
        right.append(answers)
        odds.append(round(chosen.gauss(-0.5 if answers else 0.5, 1), 6))
    return said, right, odds


# Of transformers 4's squad_metrics.py on these answers: of all and of both kinds; its best threshold for F1,
# and what it gives where "" is said above it.
OFFICIAL = {
    "exact": 0.3466666666666667,
    "f1": 0.4284973544973546,
    "has_answer_exact": 0.3829787234042553,
    "has_answer_f1": 0.4874434312732186,
    "no_answer_exact": 0.2153846153846154,
    "no_answer_f1": 0.2153846153846154,
    "f1_above_threshold": 0.4786560846560848,
    "exact_above_threshold": 0.4033333333333333,
    "best_f1_threshold": 0.914128,
}


def test_metrics_are_those_of_the_official_script():
    said, right, odds = said_and_right()
    every = [score_answer(text, answers, True) for text, answers in zip(said, right, strict=True)]
    threshold = best_threshold(every, odds)
    assert threshold == OFFICIAL["best_f1_threshold"]
    plain = means(every)
    assert plain == pytest.approx({name: OFFICIAL[name] for name in plain}, abs=1e-12)
    questions = [
        SquadQuestion(str(i), "?", "", tuple((a, 0) for a in answers)) for i, answers in enumerate(right)
    ]
    spans = [Span(text, odd) for text, odd in zip(said, odds, strict=True)]
    tuned = score_spans(spans, questions, with_none=True, dev=None)
    for name in ("exact", "f1"):
        assert tuned.metrics[name] == pytest.approx(OFFICIAL[f"{name}_above_threshold"], abs=1e-12)
    assert tuned.metrics["no_answer_threshold"] == threshold
    kept = json.loads(tuned.files["predictions.json"])
    assert all((kept[str(i)] == "") == (odd > threshold or not said[i]) for i, odd in enumerate(odds))


@pytest.mark.parametrize(
    ("said", "right", "exact", "f1"),
    [
        ("The", ["the"], 1, 0), ("a", ["...", "film"], 1, 0), ("", ["an"], 1, 0), ("film", ["the"], 0, 0),
        ("a film", ["the", "the film."], 1, 1), ("good film", ["film", "a"], 0, 2 / 3),
    ],
)  # fmt: skip
def test_answers_of_articles_alone_count_by_the_script_of_1_1(said, right, exact, f1):
    """Its exact match compares them, its F1 has no common word. The script of 2.0 drops such an answer."""
    found = score_answer(said, right, with_none=False)
    assert (found.exact, found.f1) == (exact, pytest.approx(f1))
    questions = [SquadQuestion("x", "?", "", tuple((text, 0) for text in right))]
    done = score_spans([Span(said, 0.0)], questions, with_none=False, dev=None)
    assert done.metrics == {"exact": exact, "f1": pytest.approx(f1)}


def test_a_test_split_takes_the_threshold_of_dev():
    questions = [SquadQuestion("x", "?", "", None)]
    dev = SplitScores({"no_answer_threshold": 1.5}, {})
    for odd, text in ((1.4, "yes"), (1.6, "")):
        done = score_spans([Span("yes", odd)], questions, with_none=True, dev=dev)
        assert json.loads(done.files["predictions.json"]) == {"x": text} and "f1" not in done.metrics


def test_windows_cover_every_text_and_hold_its_answers(tokenizer):
    questions, wanted = drawn(60), recipe()
    made = windows_of(wanted, tokenizer, questions)
    fields = made.samples[:]
    assert len(made.windows) > len(questions)
    answered = set()
    for number, question in enumerate(questions):
        ids = tokenizer(question.context, add_special_tokens=False)["input_ids"]
        query = tokenizer(question.question, add_special_tokens=False)["input_ids"][:6]
        covered, own = set(), [i for i, window in enumerate(made.windows) if window.of == number]
        for i in own:
            window = made.windows[i]
            row = [tokenizer.cls_token_id, *query, tokenizer.sep_token_id, *ids[window.start : window.stop]]
            assert fields["input_ids"][i] == [*row, tokenizer.sep_token_id]
            assert sum(fields["token_type_ids"][i]) == window.stop - window.start + 1
            covered.update(range(window.start, window.stop))
            start, end = fields["start_positions"][i], fields["end_positions"][i]
            if start:
                text, at = question.answers[0]
                first, last = (made.offsets[number][p - window.place + window.start] for p in (start, end))
                assert question.context[first[0] : last[1]] == text and first[0] == at
                answered.add(number)
            else:
                assert end == 0
        assert covered == set(range(len(ids)))
        starts = [made.windows[i].start for i in own]
        assert starts == [5 * i for i in range(len(own))]
    assert answered == {number for number, question in enumerate(questions) if question.answers}


def test_the_best_span_is_that_of_all_windows(tokenizer):
    """Against trying every span of at most four tokens of every window."""
    questions, longest = drawn(25, seed=2), 4
    made = windows_of(recipe(), tokenizer, questions)
    logits = np.random.default_rng(0).normal(size=(len(made.windows), 24, 2)).astype(np.float32)
    found = best_spans(made, questions, logits, longest)
    for number, (question, span) in enumerate(zip(questions, found, strict=True)):
        best, none = (-np.inf, ""), np.inf
        for window, values in zip(made.windows, logits.astype(np.float64), strict=True):
            if window.of != number:
                continue
            none = min(none, values[0, 0] + values[0, 1])
            for start, end in itertools.product(range(window.start, window.stop), repeat=2):
                if 0 <= end - start < longest:
                    place = window.place - window.start
                    score = values[start + place, 0] + values[end + place, 1]
                    characters = made.offsets[number]
                    text = question.context[characters[start][0] : characters[end][1]]
                    best = max(best, (score, text))
        assert span.text == best[1] and span.no_answer == pytest.approx(none - best[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context": None}, "context is missing"),
        ({"answers": None}, "answers are missing"),
        ({"answers": {"text": ["x"], "answer_start": []}}, "no texts with an answer_start each"),
        ({"answers": {"text": ["film"], "answer_start": [0]}}, "'film' is not at character 0"),
        ({"answers": {"text": [], "answer_start": []}}, "it has no answer"),
    ],
)
def test_a_broken_question_says_why(changes, said):
    record = {"id": "1", "question": "one?", "context": "a film"}
    record["answers"] = {"text": ["film"], "answer_start": [2]}
    assert parse(TASKS["squad1"], record, 0, True).answers == (("film", 2),)
    with pytest.raises(WrongRecord, match=said):
        parse(TASKS["squad1"], {**record, **changes}, 0, True)
