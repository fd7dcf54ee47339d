"""RACE: reading comprehension with four choices (Lai et al. 2017, arXiv 1704.04683).

A sample is [CLS] article [SEP] question and option [SEP]; an option fills the question's blank where it has
one. The article gives way where all of it does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.tasks.examples import Wrong, label_of, text_of
from data.tasks.features import Features, encode
from data.tasks.predictions import Scored, accuracy
from recipes.schema import Recipe
from recipes.tasks import TaskFacts

BLANK = "_"


@dataclass(frozen=True)
class ChoiceQuestion:
    """`id` names the article, of which `number` is a question's; `answer` None: it is hidden."""

    id: str
    number: int
    article: str
    question: str
    options: tuple[str, ...]
    answer: int | None


def parse(facts: TaskFacts, record: dict[str, Any], number: int, labelled: bool) -> ChoiceQuestion:
    """A question of a record in the hub's schema. Raises Wrong."""
    article, question = text_of(record, "article"), text_of(record, "question")
    options = record.get("options")
    if not isinstance(options, (list, tuple)) or len(options) != len(facts.labels):
        count = len(options) if isinstance(options, (list, tuple)) else "no list of"
        raise Wrong(f"it has {count} options, and {len(facts.labels)} are needed")
    if not all(isinstance(option, str) for option in options):
        raise Wrong("its options are not texts")
    answer = label_of(record, facts.label, facts.labels, labelled)
    return ChoiceQuestion(
        str(record.get("example_id", number)), number, article, question, tuple(options), answer
    )


def features(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, examples: Sequence[ChoiceQuestion]
) -> Features:
    """Four samples of every question."""
    first = [each.article for each in examples for _ in each.options]
    second = [with_option(each.question, option) for each in examples for option in each.options]
    rows = encode(tokenizer, first, second, recipe.sequence_length, "longest_first")
    labels, choices = [each.answer or 0 for each in examples], recipe.model.head_classes
    return Features(rows, {"labels": labels}, recipe.sequence_length, tokenizer.pad_token_id, choices)


def with_option(question: str, option: str) -> str:
    return question.replace(BLANK, option, 1) if BLANK in question else f"{question} {option}"


def score(facts: TaskFacts, split: str, examples: Sequence[ChoiceQuestion], logits: np.ndarray) -> Scored:
    """Accuracy, also of middle and high school where names tell them; a line of JSON for every question.

    logits (n, choices).
    """
    guesses = logits.argmax(-1)
    lines = [
        json.dumps(
            {"example_id": each.id, "question": each.question, "answer": facts.labels[guess]},
            ensure_ascii=False,
        )
        for each, guess in zip(examples, guesses, strict=True)
    ]
    metrics = {}
    if all(each.answer is not None for each in examples):
        answers = np.array([each.answer for each in examples])
        metrics["accuracy"] = accuracy(guesses, answers)
        for school in ("middle", "high"):
            rows = np.array([each.id.startswith(school) for each in examples])
            if rows.any() and not rows.all():
                metrics[f"{school}_accuracy"] = accuracy(guesses[rows], answers[rows])
    return Scored(metrics, {facts.submission[split]: "\n".join(lines) + "\n"})
