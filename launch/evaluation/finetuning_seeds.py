"""Several fine-tunings that differ in their seed, each a process of its own: median and ensemble.

    OUT/seed1234/, OUT/seed1234.log      a run directory and its output
    OUT/ensemble/SPLIT/                  predictions of all seeds together
    OUT/runs.json, OUT/summary.json      arguments and outcome

A finished run is not repeated, and an interrupted run resumes. In a run:

    RUN/predictions/dev/SST-2.tsv        in the form of the task's submissions
    RUN/predictions/dev/logits.npy       (n, classes) or (windows, S, 2), float32, for ensembles
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import TypeAdapter

from data.durable_files import quiet, write_atomically, write_json
from launch.records.facts import TaskScore
from launch.records.result import read_result
from recipes import files
from recipes.catalog import load_resolved
from recipes.problems import ProblemsError

if TYPE_CHECKING:
    from data.tasks.corpus import EncodedSplit

ARGUMENTS = "runs.json"
SUMMARY = "summary.json"
PREDICTIONS = "predictions"
LOGITS = "logits.npy"
MEMBERS = 2  # least number of seeds in an ensemble


@dataclass(frozen=True)
class SeedOutcome:
    """A seed and the scores of its run. `problem`: reason for missing scores."""

    seed: int
    scores: tuple[TaskScore, ...] = ()
    problem: str = ""

    @property
    def name(self) -> str:
        return f"seed{self.seed}"


@dataclass(frozen=True)
class Summary:
    """Outcomes of seeds: split -> metric -> median of those with scores, and their ensemble if asked for."""

    seeds: tuple[SeedOutcome, ...]
    median: Mapping[str, Mapping[str, float]]
    ensemble: tuple[TaskScore, ...] = ()

    @property
    def sound(self) -> list[SeedOutcome]:
        return [each for each in self.seeds if each.scores]


def read(out: Path) -> Summary | None:
    """Read the summary; None without a finished procedure. Raises FileError."""
    path = out / SUMMARY
    if not path.exists():
        return None
    return files.checked(TypeAdapter(Summary), files.read_json_object(path), path)


def keep_arguments(out: Path, arguments: Sequence[str]) -> None:
    """Write the common arguments of the runs; refuse to go on with other ones. Raises ProblemsError."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / ARGUMENTS
    given = {"arguments": list(arguments)}
    if path.exists() and files.read_json_object(path) != given:
        raise ProblemsError.of(
            "--out",
            f"{out} holds runs of other arguments",
            "runs that are compared have the same ones",
            "name another directory with --out",
        )
    write_json(path, given)


def run_seed(out: Path, seed: int, command: Sequence[str]) -> SeedOutcome:
    """Run or resume the fine-tuning of a seed, unless it is finished."""
    directory = out / f"seed{seed}"
    log = out / f"seed{seed}.log"
    scores = finished(directory)
    if not scores:
        own = ["--seed", str(seed), "--out", str(directory), "--resume"]
        with log.open("ab") as said:
            ended = subprocess.run(
                [sys.executable, *command, *own],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        scores = finished(directory)
    problem = "" if scores else f"ended with code {ended.returncode}, see {log}"
    return SeedOutcome(seed, scores, problem)


def finished(directory: Path) -> tuple[TaskScore, ...]:
    """Return the scores of a run that has ended; () without them."""
    path = directory / "result.json"
    result = read_result(path) if path.exists() else None
    return result.task_scores if result and result.status == "ok" else ()


def summarize(out: Path, outcomes: Sequence[SeedOutcome], *, average: bool) -> Summary:
    """Write and return the summary; with `average` also score the ensemble of at least two seeds."""
    sound = [each for each in outcomes if each.scores]
    median: dict[str, dict[str, float]] = {}
    by_split = zip(*(each.scores for each in sound), strict=True)
    for scores in by_split:
        medians = median.setdefault(scores[0].split, {})
        for metric in scores[0].metrics:
            medians[metric] = statistics.median(
                score.metrics[metric] for score in scores
            )
    joined = ensemble(out, sound) if average and len(sound) >= MEMBERS else ()
    summary = Summary(tuple(outcomes), median, joined)
    write_json(out / SUMMARY, asdict(summary))
    return summary


def ensemble(out: Path, members: Sequence[SeedOutcome]) -> tuple[TaskScore, ...]:
    """Score the seeds' mean probabilities over classes, choices, or positions of a span."""
    from data.tasks.corpus import build

    recipe = load_resolved(out / members[0].name / "recipe.yaml")
    splits = build(recipe, quiet).predicted
    logits = {}
    for each in splits:
        own = Path(PREDICTIONS, each.split.name, LOGITS)
        of_members = [np.load(out / member.name / own) for member in members]
        logits[each.split.name] = averaged(of_members)
    return keep_predictions(out / "ensemble", splits, logits)


def averaged(logits: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logarithm of the mean probabilities; logits are (n, C), or (n, S, 2) over S."""
    import torch

    shares = torch.from_numpy(np.stack(logits)).softmax(2)
    return shares.mean(0).log().numpy()


def keep_predictions(
    folder: Path, splits: Sequence[EncodedSplit], logits: Mapping[str, np.ndarray]
) -> tuple[TaskScore, ...]:
    """Score the logits of splits, dev's first; write logits and submissions below `folder`."""
    scores = list[TaskScore]()
    dev = None
    for each in splits:
        split = each.split
        scored = each.score(logits[split.name], dev)
        dev = dev or scored
        place = folder / split.name
        place.mkdir(parents=True, exist_ok=True)
        np.save(place / LOGITS, logits[split.name])
        for name, text in scored.files.items():
            write_atomically(place / name, text)
        scores.append(
            TaskScore(
                split.name,
                dict(scored.metrics),
                len(split.records),
                split.incomplete,
                tuple(scored.files),
            )
        )
    return tuple(scores)
