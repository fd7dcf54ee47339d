"""The outcome of several fine-tunings of one task: OUT/summary.json, and its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from data.durable_files import write_atomically
from launch.console import terminal
from launch.console.text_table import table
from launch.records.facts import TaskScore
from recipes import files
from recipes.problems import counted
from recipes.tasks import TaskFacts

SUMMARY = "summary.json"  # next to the directories of the runs
MEMBERS = 2  # seeds that an ensemble takes at least


@dataclass(frozen=True)
class Trial:
    """One run."""

    batch: int
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"batch{self.batch}-lr{self.lr:g}-seed{self.seed}"

    @property
    def flags(self) -> list[str]:
        return ["--batch", str(self.batch), "--lr", repr(self.lr), "--seed", str(self.seed)]


@dataclass(frozen=True)
class Finished(Trial):
    """A trial and what came of it. `problem`: why it has no scores."""

    scores: tuple[TaskScore, ...] = ()
    problem: str = ""

    @property
    def trial(self) -> Trial:
        return Trial(self.batch, self.lr, self.seed)

    def value(self, metric: str) -> float:
        """Of the dev set."""
        return self.scores[0].metrics[metric]


@dataclass(frozen=True)
class Summary:
    """Of a grid, seeds and their ensemble.

    Attributes:
        metric: by which the best of the grid was chosen.
        median: split -> metric -> value, of the seeds that have scores.
        grid: empty: none was asked for.
        ensemble: None: none was asked for; empty: fewer than MEMBERS seeds have scores.
        ensemble_of: seeds that have scores, where an ensemble was asked for.
    """

    metric: str
    seeds: tuple[Finished, ...]
    median: Mapping[str, Mapping[str, float]]
    grid: tuple[Finished, ...] = ()
    ensemble: tuple[TaskScore, ...] | None = None
    ensemble_of: int | None = None


_FORM = TypeAdapter(Summary)


def write(summary: Summary, out: Path) -> None:
    write_atomically(out / SUMMARY, json.dumps(asdict(summary), indent=1) + "\n")


def read(out: Path) -> Summary | None:
    """None where no procedure has come to its end there. Raises FileError."""
    path = out / SUMMARY
    return files.checked(_FORM, files.read_json_object(path), path) if path.exists() else None


def summary_text(summary: Summary, facts: TaskFacts) -> str:
    """The rows of every run, the median and the ensemble."""
    headings = ("", "batch", "lr", "seed", facts.title)
    return table(list(_rows(summary)), headings, align="lrrrl", width=terminal.columns())


def _rows(summary: Summary) -> Iterator[tuple[object, ...]]:
    for kind, made in (("grid", summary.grid), ("seeds", summary.seeds)):
        for row in made:
            told = row.problem or "; ".join(_told(each.split, each.metrics) for each in row.scores)
            yield kind, row.batch, f"{row.lr:g}", row.seed, told
    for split, metrics in summary.median.items():
        yield "median", "", "", "", _told(split, metrics)
    for each in summary.ensemble or ():
        yield "ensemble", "", "", "", _told(each.split, each.metrics)
    if summary.ensemble == ():
        had = f"{counted(summary.ensemble_of or 0, 'seed')} of {len(summary.seeds)} with scores"
        yield "ensemble", "", "", "", f"none: {had}, and an ensemble takes {MEMBERS}"


def _told(split: str, metrics: Mapping[str, float]) -> str:
    values = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
    return f"{split}: {values or 'labels are hidden'}"
