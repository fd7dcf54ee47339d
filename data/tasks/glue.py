"""GLUE's tasks of classes (SST-2, RTE, MRPC, MNLI, QQP): examples, samples, predictions and their metrics.

Wang et al. 2018 (arXiv 1804.07461). Submissions are tables of index and prediction, one file for each test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.tasks.examples import label_of, text_of
from data.tasks.features import Features, encode
from data.tasks.predictions import Scored, accuracy, f1
from recipes.schema import Recipe
from recipes.tasks import TaskFacts


@dataclass(frozen=True)
class ClassExample:
    """One or two texts; `label` None: it is hidden."""

    index: int
    texts: tuple[str, ...]
    label: int | None


def parse(facts: TaskFacts, record: dict[str, Any], number: int, labelled: bool) -> ClassExample:
    """An example of a record in the hub's schema. Raises Wrong."""
    texts = tuple(text_of(record, name) for name in facts.texts)
    index = record.get("idx", number)
    label = label_of(record, facts.label, facts.labels, labelled)
    return ClassExample(index if isinstance(index, int) else number, texts, label)


def features(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, examples: Sequence[ClassExample]
) -> Features:
    """The longer of two texts gives way where both are too long; a hidden label is 0."""
    columns = list(zip(*(each.texts for each in examples), strict=True))
    second = columns[1] if len(columns) > 1 else None
    rows = encode(tokenizer, columns[0], second, recipe.sequence_length, "longest_first")
    labels = [each.label or 0 for each in examples]
    return Features(rows, {"labels": labels}, recipe.sequence_length, tokenizer.pad_token_id)


def score(facts: TaskFacts, split: str, examples: Sequence[ClassExample], logits: np.ndarray) -> Scored:
    """logits (n, classes)."""
    guesses = logits.argmax(-1)
    names = [facts.labels[guess] if facts.named_labels else str(guess) for guess in guesses]
    lines = [f"{each.index}\t{name}" for each, name in zip(examples, names, strict=True)]
    table = "\n".join(["index\tprediction", *lines]) + "\n"
    metrics = {}
    if all(each.label is not None for each in examples):
        labels = np.array([each.label for each in examples])
        metrics["accuracy"] = accuracy(guesses, labels)
        if facts.f1:
            metrics["f1"] = f1(guesses, labels)
    return Scored(metrics, {facts.submission[split]: table})
