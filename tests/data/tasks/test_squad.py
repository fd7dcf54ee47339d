"""SQuAD: its metrics to the digit, windows that cover every token, the best span over them, its threshold."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from datasets import Dataset
from tasked import VOCABULARY, WORDS
from transformers import BertTokenizer

from data.tasks.choices import SplitScores
from data.tasks.squad import best_spans, best_threshold, encode, means, score_answers, score_texts
from recipes.schema import Recipe


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


def drawn(count: int, seed: int = 0) -> Dataset:
    """Questions about texts of very different lengths, every third without an answer."""
    chosen, found = random.Random(seed), []
    for number in range(count):
        words = chosen.choices(WORDS, k=chosen.choice([1, 3, 12, 19, 20, 40]))
        context, at = " ".join(words), chosen.randrange(len(words))
        start = len(" ".join(words[:at])) + (at > 0)
        answers = {"text": [words[at]], "answer_start": [start]} if number % 3 else {}
        query = " ".join(chosen.choices(WORDS, k=chosen.randint(1, 9)))
        label = answers or {"text": [], "answer_start": []}
        found.append({"id": str(number), "question": query, "context": context, "label": label})
    return Dataset.from_list(found)


def windows_of(records, tokenizer, recipe) -> Dataset:
    return Dataset.from_dict(encode(recipe, tokenizer, records[:], [*range(len(records))]))


def answered(answers) -> Dataset:
    label = [None if each is None else {"text": each, "answer_start": [0] * len(each)} for each in answers]
    return Dataset.from_dict({"id": [str(i) for i in range(len(answers))], "label": label})


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
    every = score_answers(said, right, True)
    threshold = best_threshold(every, np.array(odds))
    assert threshold == OFFICIAL["best_f1_threshold"]
    assert (
        best_threshold(np.array([[1.0, 1, 1, 1], [0, 0, 0, 1]]), np.zeros(2)) == -1
    )  # equal odds go together
    plain = means(every)
    assert plain == pytest.approx({name: OFFICIAL[name] for name in plain}, abs=1e-12) and len(plain) == 6
    tuned = score_texts(said, np.array(odds), answered(right), None, with_none=True)
    for name in ("exact", "f1"):
        assert tuned.metrics[name] == pytest.approx(OFFICIAL[f"{name}_above_threshold"], abs=1e-12)
    assert tuned.metrics["no_answer_threshold"] == threshold
    kept = json.loads(tuned.files["predictions.json"])
    assert all((kept[str(i)] == "") == (odd > threshold or not said[i]) for i, odd in enumerate(odds))
    assert json.loads(tuned.files["null_odds.json"])["1"] == odds[1]


@pytest.mark.parametrize(
    ("said", "right", "exact", "f1"),
    [
        ("The", ["the"], 1, 0), ("a", ["...", "film"], 1, 0), ("", ["an"], 1, 0), ("film", ["the"], 0, 0),
        ("a film", ["the", "the film."], 1, 1), ("good film", ["film", "a"], 0, 2 / 3),
    ],
)  # fmt: skip
def test_answers_of_articles_alone_count_by_the_script_of_1_1(said, right, exact, f1):
    """Its exact match compares them, its F1 has no common word. The script of 2.0 drops such an answer."""
    done = score_texts([said], np.zeros(1), answered([right]), None, with_none=False)
    assert done.metrics == {"exact": exact, "f1": pytest.approx(f1)} and [*done.files] == ["predictions.json"]


def test_a_test_split_takes_the_threshold_of_dev():
    dev = SplitScores({"no_answer_threshold": 1.5}, {})
    for odd, text in ((1.4, "yes"), (1.6, "")):
        done = score_texts(["yes"], np.array([odd]), answered([None]), dev, with_none=True)
        assert json.loads(done.files["predictions.json"]) == {"0": text} and "f1" not in done.metrics


def test_windows_cover_every_text_and_hold_its_answers(tokenizer):
    records, wanted = drawn(60), recipe()
    fields = windows_of(records, tokenizer, wanted)[:]
    assert len(fields["row"]) > len(records)
    answered = set()
    for number, record in enumerate(records):
        context, answers = record["context"], record["label"]
        made = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = made["input_ids"], [list(place) for place in made["offset_mapping"]]
        query = tokenizer(record["question"], add_special_tokens=False)["input_ids"][:6]
        before = [tokenizer.cls_token_id, *query, tokenizer.sep_token_id]
        own = [i for i, row in enumerate(fields["row"]) if row == number]
        room = 24 - len(before) - 1
        for place, i in enumerate(own):
            part = slice(5 * place, 5 * place + room)
            assert fields["input_ids"][i] == [*before, *ids[part], tokenizer.sep_token_id]
            assert sum(fields["token_type_ids"][i]) == len(ids[part]) + 1
            characters = fields["characters"][i]
            assert characters == [[0, 0]] * len(before) + places[part] + [[0, 0]]
            start, end = fields["start_positions"][i], fields["end_positions"][i]
            if start:
                begin, stop = characters[start][0], characters[end][1]
                assert context[begin:stop] == answers["text"][0] and begin == answers["answer_start"][0]
                answered.add(number)
            else:
                assert end == 0
        assert part.stop >= len(ids) > part.stop - 5 or len(own) == 1
    assert answered == {number for number, label in enumerate(records["label"]) if label["text"]}


def test_the_best_span_is_that_of_all_windows(tokenizer):
    """Against trying every span of at most four tokens of every window."""
    records, longest = drawn(25, seed=2), 4
    made = windows_of(records, tokenizer, recipe())
    logits = np.random.default_rng(0).normal(size=(len(made), 24, 2)).astype(np.float32)
    texts, odds = best_spans(records, made, logits, longest)
    for number, context in enumerate(records["context"]):
        best, none = (-np.inf, ""), np.inf
        for row, characters, values in zip(made["row"], made["characters"], logits.tolist(), strict=True):
            if row != number:
                continue
            none = min(none, values[0][0] + values[0][1])
            for start, end in itertools.product(range(len(characters)), repeat=2):
                if 0 <= end - start < longest and characters[start][1] and characters[end][1]:
                    text = context[characters[start][0] : characters[end][1]]
                    best = max(best, (values[start][0] + values[end][1], text))
        assert texts[number] == best[1] and odds[number] == pytest.approx(none - best[0])
