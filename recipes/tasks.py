"""Data sets for fine-tuning a BERT: names, heads, fields and labels. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from recipes.schema import TaskHead, TaskName

# those after the first are predicted, in this order
SPLITS = ("train", "dev", "dev_mismatched", "test", "test_mismatched")


@dataclass(frozen=True)
class TaskFacts:
    """Facts of one data set.

    Attributes:
        hub: name of the data set on the hub, and its configuration.
        texts: fields with the texts of an example, in order.
        labels: names of the classes or choices by their numbers; () for spans.
        sequence_length: tokens of a sample, by default.
        batch, lr: by default; RoBERTa (Liu et al. 2019, arXiv 1907.11692), table 10, has them for its grid.
        submission: split -> the benchmark's name of the file.
        named_labels: True if the file has names of labels, not their numbers.
        f1: True if F1 of label 1 is reported next to accuracy.
        splits: split of ours -> split on the hub.
    """

    title: str
    head: TaskHead
    hub: tuple[str, str | None]
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    sequence_length: int = 128
    batch: int = 32
    lr: float = 2e-5
    submission: Mapping[str, str] = field(default_factory=dict)
    named_labels: bool = False
    f1: bool = False
    splits: Mapping[str, str] = field(
        default_factory=lambda: {"train": "train", "dev": "validation", "test": "test"}
    )

    @property
    def classes(self) -> int:
        """Number of classes or choices; 2 for spans, which have neither."""
        return len(self.labels) or 2


def _glue(
    name: str, title: str, texts: str, labels: str, file: str, **more: Any
) -> TaskFacts:
    return TaskFacts(
        title,
        "classification",
        ("nyu-mll/glue", name),
        tuple(texts.split()),
        tuple(labels.split()),
        submission=dict.fromkeys(("dev", "test"), f"{file}.tsv"),
        **more,
    )


def _squad(title: str, hub: str) -> TaskFacts:
    submission = dict.fromkeys(("dev", "test"), "predictions.json")
    splits = {"train": "train", "dev": "validation"}
    texts = ("question", "context")
    return TaskFacts(
        title, "span", (hub, None), texts, (), 384, 32, 3e-5, submission, splits=splits
    )


TASKS: Mapping[TaskName, TaskFacts] = {
    "sst2": _glue("sst2", "SST-2, sentiment of sentences", "sentence", "negative positive", "SST-2"),
    "rte": _glue(
        "rte", "RTE, entailment", "sentence1 sentence2", "entailment not_entailment", "RTE", named_labels=True
    ),
    "mrpc": _glue(
        "mrpc", "MRPC, paraphrases", "sentence1 sentence2", "not_equivalent equivalent", "MRPC", f1=True
    ),
    "mnli": replace(
        _glue(
            "mnli", "MNLI, entailment over genres", "premise hypothesis", "entailment neutral contradiction",
            "MNLI-m", named_labels=True,
        ),
        submission={
            "dev": "MNLI-m.tsv", "dev_mismatched": "MNLI-mm.tsv",
            "test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv",
        },
        splits={
            "train": "train", "dev": "validation_matched", "dev_mismatched": "validation_mismatched",
            "test": "test_matched", "test_mismatched": "test_mismatched",
        },
    ),
    "qqp": _glue(
        "qqp", "QQP, equal questions", "question1 question2", "not_duplicate duplicate", "QQP", f1=True
    ),
    "squad1": _squad("SQuAD 1.1, answers in a text", "rajpurkar/squad"),
    "squad2": _squad("SQuAD 2.0, answers in a text or none", "rajpurkar/squad_v2"),
    "race": TaskFacts(
        "RACE, four choices", "choice", ("ehovy/race", "all"), ("article", "question", "options"),
        ("A", "B", "C", "D"), 512, 16, 1e-5, {"dev": "race.jsonl", "test": "race.jsonl"},
    ),
}  # fmt: skip
