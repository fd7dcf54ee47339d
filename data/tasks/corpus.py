"""The data of a fine-tuning run, from the recipe's task."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from data.tasks.records import Split, read_split, task_of
from data.text.vocabulary import build_vocabulary, vocabulary_digest
from recipes.problems import Problem, ProblemsError, counted
from recipes.schema import Recipe
from recipes.tasks import SPLITS, TASKS


@dataclass(frozen=True)
class EncodedSplit:
    """The samples of a split, and the scoring of their logits.

    Attributes:
        score: (logits (n, C) or (n, S, 2), the dev split's scores or None) -> metrics and submission.
    """

    split: Split
    samples: Dataset
    score: Callable[[np.ndarray, SplitScores | None], SplitScores]


@dataclass(frozen=True)
class TaskCorpus(Corpus):
    """A corpus of `datasets`, with splits to predict at the end; dev, the first, is the validation."""

    train: Any
    predicted: tuple[EncodedSplit, ...] = ()


def build(recipe: Recipe, say: Say = print) -> TaskCorpus:
    """Read and tokenize every split of the recipe's task, on every rank.

    Raises ProblemsError: a split cannot be had, lacks the task's fields or holds wrong records; or the
    vocabulary is not the model's.
    """
    task = task_of(recipe)
    facts = TASKS[task.name]
    tokenizer = build_vocabulary(recipe, (), Path(), say)
    every = _encoded(recipe, tokenizer)
    for each in every:
        if each.split.incomplete:
            records = counted(each.split.incomplete, "record")
            say(f"{each.split.name}: {records} without a text or a label left out")
    train = every[0].samples
    dev = every[1].samples
    span = facts.head == "span"
    target = "start_positions" if span else "labels"
    classes = recipe.sequence_length if span else facts.classes
    counts = np.bincount(train[target], minlength=classes)
    digest = 0
    for rows in train.iter(1000):
        digest = zlib.crc32(json.dumps(rows).encode(), digest)
    return TaskCorpus(
        tokenizer=tokenizer,
        train=train,
        validation=HeldOut(Fields()),
        test=None,
        uniform_entropy=float(np.log(classes)),
        unigram_entropy=unigram_cross_entropy(counts, np.array(dev[target])),
        summary={
            "source": f"{task.name} ({task.train or facts.hub[0]})",
            "vocabulary": recipe.data.tokenizer.kind,
            "vocabulary_size": len(tokenizer),
            "vocabulary_digest": vocabulary_digest(tokenizer),
            "train_documents": len(every[0].split.records),
            "train_tokens_crc32": f"{digest:08x}",
            "samples_per_epoch": len(train),
            "validation_samples": len(dev),
            "broken_examples": {each.split.name: each.split.incomplete for each in every},
        },
        predicted=every[1:],
    )  # fmt: skip


def _encoded(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast
) -> tuple[EncodedSplit, ...]:
    """Read and encode the splits; with local files those with a file, with the hub all.

    Raises ProblemsError with the problems of all.
    """
    task = task_of(recipe)
    facts = TASKS[task.name]
    hub = () if task.train else facts.splits
    kind: Any = squad if facts.head == "span" else choices
    splits = list[Split]()
    problems = list[Problem]()
    for name in SPLITS:
        path = getattr(task, name)
        if not (path or name in hub):
            continue
        try:
            splits.append(read_split(facts, name, path))
        except ProblemsError as error:
            problems += error.problems
    if problems:
        raise ProblemsError(problems)
    made = list[EncodedSplit]()
    for split in splits:
        samples = split.records.map(
            partial(kind.encode, recipe, tokenizer),
            batched=True,
            with_indices=True,
            remove_columns=split.records.column_names,
            new_fingerprint=split.name,  # nothing is cached
        )
        made.append(
            EncodedSplit(split, samples, partial(kind.score, recipe, split, samples))
        )
    return tuple(made)
