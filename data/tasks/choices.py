"""Tasks with one label per example: GLUE's classes, and RACE's questions with four choices.

GLUE (SST-2, RTE, MRPC, MNLI, QQP): Wang et al. 2018, arXiv 1804.07461; a submission is a table of index and
prediction for each test. RACE: Lai et al. 2017, arXiv 1704.04683; a sample is [CLS] article [SEP] question
and option [SEP], and an option fills the question's blank where it has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from data.tasks.records import HIDDEN, Split, task_of
from recipes.schema import Recipe
from recipes.tasks import TASKS

BLANK = "_"


@dataclass(frozen=True)
class SplitScores:
    """Metrics of a split, in shares of 1 (none where labels are hidden), and the files of a submission."""

    metrics: Mapping[str, float]
    files: Mapping[str, str] = field(repr=False)


def encode(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    batch: Mapping[str, Any],
    rows: list[int],
) -> dict[str, Any]:
    """Encode examples, of a question each choice. The longer of two texts is cut; a hidden label is 0."""
    facts = TASKS[task_of(recipe).name]
    texts = []
    for name in facts.texts:
        texts.append([text or "" for text in batch[name]])
    choices = len(facts.labels) if facts.head == "choice" else 1
    if choices > 1:
        articles = list[str]()
        filled = list[str]()
        for article, question, options in zip(*texts, strict=True):
            articles += [article] * choices
            filled += [with_option(question, option or "") for option in options]
        texts = [articles, filled]
    made = dict(tokenizer(
        *texts, truncation="longest_first", max_length=recipe.sequence_length,
        return_token_type_ids=True, verbose=False,
    ))  # fmt: skip
    if choices > 1:
        for name, encoded in made.items():
            starts = range(0, len(encoded), choices)
            made[name] = [encoded[start : start + choices] for start in starts]
    made["labels"] = [max(label, 0) for label in batch["label"]]
    return made


def with_option(question: str, option: str) -> str:
    if BLANK in question:
        return question.replace(BLANK, option, 1)
    return f"{question} {option}"


def score(
    recipe: Recipe,
    split: Split,
    samples: Dataset,
    logits: np.ndarray,
    dev: SplitScores | None,
) -> SplitScores:
    """Compute accuracy, F1 if the task has it, and RACE's accuracy by school; write the submission.

    `logits`: (n, classes or choices).
    """
    facts = TASKS[task_of(recipe).name]
    guesses = logits.argmax(-1)
    labels = np.array(split.records["label"])
    ids = split.records["id"]
    known = labels != HIDDEN
    metrics = dict[str, float]()
    if known.any():
        right = (guesses == labels)[known]
        metrics["accuracy"] = float(right.mean())
        if facts.f1:
            metrics["f1"] = f1(guesses[known], labels[known])
        for school in ("middle", "high") if facts.head == "choice" else ():
            of_school = np.array([each.startswith(school) for each in ids])[known]
            if of_school.any() and not of_school.all():
                metrics[f"{school}_accuracy"] = float(right[of_school].mean())
    if facts.head == "choice":
        rows = zip(ids, split.records["question"], guesses, strict=True)
        lines = [
            json.dumps(
                {
                    "example_id": own,
                    "question": question,
                    "answer": facts.labels[guess],
                },
                ensure_ascii=False,
            )
            for own, question, guess in rows
        ]
    else:
        names = facts.labels if facts.named_labels else range(len(facts.labels))
        pairs = zip(ids, guesses, strict=True)
        lines = [
            "index\tprediction",
            *(f"{own}\t{names[guess]}" for own, guess in pairs),
        ]
    return SplitScores(metrics, {facts.submission[split.name]: "\n".join(lines) + "\n"})


def f1(guesses: np.ndarray, labels: np.ndarray) -> float:
    """Return F1 of label 1, 2 tp / (2 tp + fp + fn); 0 where neither guesses nor labels have a 1."""
    both = int((guesses * labels == 1).sum())
    sizes = int((guesses == 1).sum() + (labels == 1).sum())
    return 2 * both / sizes if sizes else 0.0
