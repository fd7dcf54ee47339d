"""Summary of several fine-tunings of one task: OUT/summary.json, and its text."""

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
MEMBERS = 2  # least number of seeds in an ensemble


@dataclass(frozen=True)
class Trial:
    """Batch, learning rate and seed of one run."""

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
class TrialOutcome(Trial):
    """A trial and its scores. `problem`: reason for missing scores."""

    scores: tuple[TaskScore, ...] = ()
    problem: str = ""

    @property
    def trial(self) -> Trial:
        return Trial(self.batch, self.lr, self.seed)

    def value(self, metric: str) -> float:
        """Return a metric of the dev set."""
        return self.scores[0].metrics[metric]


@dataclass(frozen=True)
class Summary:
    """Outcomes of a grid, of seeds and of their ensemble.

    Attributes:
        metric: criterion for the best trial of the grid.
        median: split -> metric -> value, over the seeds with scores.
        grid: empty if not requested.
        ensemble: None if not requested; empty if fewer than MEMBERS seeds have scores.
        ensemble_of: number of seeds with scores, if an ensemble was requested.
    """

    metric: str
    seeds: tuple[TrialOutcome, ...]
    median: Mapping[str, Mapping[str, float]]
    grid: tuple[TrialOutcome, ...] = ()
    ensemble: tuple[TaskScore, ...] | None = None
    ensemble_of: int | None = None


_FORM = TypeAdapter(Summary)


def write(summary: Summary, out: Path) -> None:
    write_atomically(out / SUMMARY, json.dumps(asdict(summary), indent=1) + "\n")


def read(out: Path) -> Summary | None:
    """Read the summary; None without a finished procedure. Raises FileError."""
    path = out / SUMMARY
    return files.checked(_FORM, files.read_json_object(path), path) if path.exists() else None


def summary_text(summary: Summary, facts: TaskFacts) -> str:
    """Return a table with a row per run, the median and the ensemble."""
    headings = ("", "batch", "lr", "seed", facts.title)
    return table(list(_rows(summary)), headings, align="lrrrl", width=terminal.columns())


def _rows(summary: Summary) -> Iterator[tuple[object, ...]]:
    for kind, made in (("grid", summary.grid), ("seeds", summary.seeds)):
        for row in made:
            told = row.problem or "; ".join(_split_text(each.split, each.metrics) for each in row.scores)
            yield kind, row.batch, f"{row.lr:g}", row.seed, told
    for split, metrics in summary.median.items():
        yield "median", "", "", "", _split_text(split, metrics)
    for each in summary.ensemble or ():
        yield "ensemble", "", "", "", _split_text(each.split, each.metrics)
    if summary.ensemble == ():
        had = f"{counted(summary.ensemble_of or 0, 'seed')} of {len(summary.seeds)} with scores"
        yield "ensemble", "", "", "", f"none: {had}, and an ensemble takes {MEMBERS}"


def _split_text(split: str, metrics: Mapping[str, float]) -> str:
    values = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items())
    return f"{split}: {values or 'labels are hidden'}"
