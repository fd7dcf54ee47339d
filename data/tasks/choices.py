"""Tasks with one label per example: GLUE's classes, and RACE's questions with four choices.

GLUE (SST-2, RTE, MRPC, MNLI, QQP): Wang et al. 2018, arXiv 1804.07461; a submission is a table of index and
prediction for each test. RACE: Lai et al. 2017, arXiv 1704.04683; a sample is [CLS] article [SEP] question
and option [SEP], and an option fills the question's blank where it has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from data.tasks.records import WrongRecord, label_of, text_of
from recipes.schema import Recipe
from recipes.tasks import TASKS, TaskFacts

BLANK = "_"


@dataclass(frozen=True)
class SplitScores:
    """Metrics of a split, in shares of 1 (none where labels are hidden), and the files of a submission."""

    metrics: Mapping[str, float]
    files: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Example:
    """One or two texts for each choice (GLUE: one choice), and a label; None: it is hidden."""

    id: int | str
    choices: tuple[tuple[str, ...], ...]
    label: int | None
    question: str = ""


def parse(
    facts: TaskFacts, record: dict[str, Any], number: int, labelled: bool
) -> Example:
    """Make an example of a record in the hub's schema. Raises WrongRecord."""
    if facts.head == "choice":
        return _question(facts, record, number, labelled)
    texts = tuple(text_of(record, name, labelled) for name in facts.texts)
    stated = str(record.get("idx"))  # a text in a table
    index = int(stated) if stated.isdecimal() else number
    label = label_of(record, facts.label, facts.labels, labelled)
    return Example(index, (texts,), label)


def _question(
    facts: TaskFacts, record: dict[str, Any], number: int, labelled: bool
) -> Example:
    article, question = (text_of(record, name, labelled) for name in facts.texts[:2])
    options = record.get("options")
    if not isinstance(options, list | tuple) or len(options) != len(facts.labels):
        raise WrongRecord(
            f"its options {str(options)[:40]} are no list of {len(facts.labels)}"
        )
    if not all(isinstance(option, str) for option in options):
        raise WrongRecord("its options are not texts")
    choices = tuple((article, with_option(question, option)) for option in options)
    label = label_of(record, facts.label, facts.labels, labelled)
    return Example(str(record.get("example_id", number)), choices, label, question)


def with_option(question: str, option: str) -> str:
    return (
        question.replace(BLANK, option, 1)
        if BLANK in question
        else f"{question} {option}"
    )


def training(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]
) -> Dataset:
    """Encode every example: of a question, each choice. The longer of two texts is cut; a hidden label is 0."""
    texts = [choice for each in examples for choice in each.choices]
    columns = (list(column) for column in zip(*texts, strict=True))
    made = dict(tokenizer(
        *columns, truncation="longest_first", max_length=recipe.sequence_length,
        return_token_type_ids=True, verbose=False,
    ))  # fmt: skip
    choices = len(examples[0].choices)
    if choices > 1:
        for name, rows in made.items():
            starts = range(0, len(rows), choices)
            made[name] = [rows[start : start + choices] for start in starts]
    made["labels"] = [each.label or 0 for each in examples]
    return Dataset.from_dict(made)


def predicted(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast,
    split: str,
    examples: Sequence[Example],
) -> tuple[Dataset, Callable[[np.ndarray, SplitScores | None], SplitScores]]:
    """Return samples to predict, and a function to score their logits (n, classes or choices)."""
    assert recipe.task is not None
    facts = TASKS[recipe.task.name]
    return training(recipe, tokenizer, examples), lambda logits, dev: score(
        facts, split, examples, logits
    )


def score(
    facts: TaskFacts, split: str, examples: Sequence[Example], logits: np.ndarray
) -> SplitScores:
    """Compute accuracy, F1 if the task has it, and RACE's accuracy by school; write the submission."""
    guesses = logits.argmax(-1)
    metrics = dict[str, float]()
    known = [row for row, each in enumerate(examples) if each.label is not None]
    if known:
        labels = np.array([examples[row].label for row in known])
        guessed = guesses[known]
        metrics["accuracy"] = accuracy(guessed, labels)
        if facts.f1:
            metrics["f1"] = f1(guessed, labels)
        for school in ("middle", "high") if facts.head == "choice" else ():
            rows = np.array([str(examples[row].id).startswith(school) for row in known])
            if rows.any() and not rows.all():
                metrics[f"{school}_accuracy"] = accuracy(guessed[rows], labels[rows])
    lines = [] if facts.head == "choice" else ["index\tprediction"]
    for each, guess in zip(examples, guesses, strict=True):
        if facts.head == "choice":
            answer = {
                "example_id": each.id,
                "question": each.question,
                "answer": facts.labels[guess],
            }
            lines.append(json.dumps(answer, ensure_ascii=False))
        else:
            lines.append(
                f"{each.id}\t{facts.labels[guess] if facts.named_labels else guess}"
            )
    return SplitScores(metrics, {facts.submission[split]: "\n".join(lines) + "\n"})


def accuracy(guesses: np.ndarray, labels: np.ndarray) -> float:
    """Return the share of right guesses, both (n,)."""
    return float((guesses == labels).mean())


def f1(guesses: np.ndarray, labels: np.ndarray) -> float:
    """Return F1 of label 1, 2 tp / (2 tp + fp + fn); 0 where neither guesses nor labels have a 1."""
    true = labels == 1
    found = guesses == 1
    both = int((true & found).sum())
    sizes = int(true.sum()) + int(found.sum())
    return 2 * both / sizes if sizes else 0.0
