"""The data of a fine-tuning run, from the recipe's task."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from data.corpus import Corpus, unigram_cross_entropy
from data.durable_files import Say
from data.samples.fields import Fields, HeldOut
from data.tasks import choices, squad
from data.tasks.choices import SplitScores
from data.tasks.records import (
    Examples,
    check_split,
    is_test,
    parse_examples,
    read_split,
)
from data.text.vocabulary import build_vocabulary, vocabulary_digest
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe, Task
from recipes.tasks import TASKS

# to predict, in this order
SPLITS = ("dev", "dev_mismatched", "test", "test_mismatched")


@dataclass(frozen=True)
class PredictedSplit:
    """A split to predict: its samples and the scoring of their logits.

    Attributes:
        score: (logits (n, C) or (n, S, 2), the dev split's scores or None) -> metrics and submission.
        examples: number of sound examples; `broken` ones count in no metric.
    """

    name: str
    samples: Dataset
    score: Callable[[np.ndarray, SplitScores | None], SplitScores]
    examples: int
    broken: int


@dataclass(frozen=True)
class TaskCorpus(Corpus):
    """A corpus of `datasets`, with splits to predict at the end; dev, the first, is the validation."""

    train: Any
    predicted: tuple[PredictedSplit, ...] = ()


# Modules with the functions `parse`, `training` and `predicted` for the tasks of a head.
KINDS: Mapping[str, Any] = {"classification": choices, "choice": choices, "span": squad}


def build(recipe: Recipe, say: Say = print) -> TaskCorpus:
    """Read and tokenize every split of the recipe's task, on every rank.

    Raises ProblemsError: a split cannot be had, lacks the task's fields or a sound example; or the vocabulary
    is not the model's.
    """
    task = _task(recipe)
    tokenizer = build_vocabulary(recipe, (), Path(), say)
    facts = TASKS[task.name]
    names = ("train", *split_names(task))
    of_train, *others = [_examples(task, split) for split in names]
    for each in (of_train, *others):
        if str(each):
            say(str(each))
    train = KINDS[facts.head].training(recipe, tokenizer, of_train.sound)
    predicted = tuple(_predicted(recipe, tokenizer, each) for each in others)
    target = "start_positions" if facts.head == "span" else "labels"
    labels = np.array(train[target])
    classes = recipe.sequence_length if facts.head == "span" else facts.classes
    digest = 0
    for rows in train.iter(1000):
        digest = zlib.crc32(json.dumps(rows).encode(), digest)
    return TaskCorpus(
        tokenizer=tokenizer,
        train=train,
        validation=HeldOut(Fields()),
        test=None,
        uniform_entropy=float(np.log(classes)),
        unigram_entropy=unigram_cross_entropy(
            np.bincount(labels, minlength=classes),
            np.array(predicted[0].samples[target]),
        ),
        summary={
            "source": f"{task.name} ({task.train or facts.hub[0]})",
            "vocabulary": recipe.data.tokenizer.kind,
            "vocabulary_size": len(tokenizer),
            "vocabulary_digest": vocabulary_digest(tokenizer),
            "train_documents": len(of_train.sound),
            "train_tokens_crc32": f"{digest:08x}",
            "samples_per_epoch": len(train),
            "validation_samples": len(predicted[0].samples),
            "broken_examples": {each.split: len(each.broken) for each in (of_train, *others)},
        },
        predicted=predicted,
    )  # fmt: skip


def splits_to_predict(recipe: Recipe, say: Say) -> tuple[PredictedSplit, ...]:
    """Read the splits of a finished run again, to score its saved logits."""
    task = _task(recipe)
    tokenizer = build_vocabulary(recipe, (), Path(), say)
    return tuple(
        _predicted(recipe, tokenizer, _examples(task, split))
        for split in split_names(task)
    )


def _predicted(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, examples: Examples[Any]
) -> PredictedSplit:
    split = examples.split
    sound = examples.sound
    broken = examples.broken
    samples, score = KINDS[TASKS[_task(recipe).name].head].predicted(
        recipe, tokenizer, split, sound
    )
    scored = len(sound) - len(broken) if is_test(split) else len(sound)
    return PredictedSplit(split, samples, score, scored, len(broken))


def check(recipe: Recipe) -> None:
    """Check that the files and the vocabulary of a recipe's task exist. Raises ProblemsError."""
    task = _task(recipe)
    problems = list[Problem]()
    for split in ("train", *SPLITS):
        path = getattr(task, split)
        if path is None:
            continue
        try:
            check_split(split, path)
        except ProblemsError as error:
            problems += error.problems
        if split.endswith("mismatched") and task.name != "mnli":
            rule = "only MNLI has examples of other genres"
            problems.append(
                Problem(
                    f"--{split}",
                    f"--{split} with --task {task.name}",
                    rule,
                    "leave it out",
                )
            )
    if (task.train is None) != (task.dev is None):
        there, lacking = ("train", "dev") if task.train else ("dev", "train")
        came = f"--{there} without --{lacking}"
        rule = "files take the place of the hub's data set together"
        problems.append(Problem(f"--{lacking}", came, rule, f"add --{lacking} FILE"))
    if problems:
        raise ProblemsError(problems)
    build_vocabulary(recipe, (), Path(), lambda line: None)


def split_names(task: Task) -> list[str]:
    """List the splits to predict: with local files those with a file, with the hub all."""
    local = task.train is not None
    facts = TASKS[task.name]
    return [
        split
        for split in SPLITS
        if getattr(task, split) or (not local and split in facts.splits)
    ]


def _examples(task: Task, split: str) -> Examples[Any]:
    facts = TASKS[task.name]
    records = read_split(facts, split, getattr(task, split))
    return parse_examples(facts, split, records, KINDS[facts.head].parse)


def _task(recipe: Recipe) -> Task:
    assert recipe.task is not None, "a recipe for fine-tuning"
    return recipe.task
