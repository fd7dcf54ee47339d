"""Several fine-tunings that differ in their seed, each a process of its own: median and ensemble.

    OUT/seed1234/, OUT/seed1234.log      a run directory and its output
    OUT/ensemble/SPLIT/                  predictions of all seeds together
    OUT/runs.json, OUT/summary.json      arguments and outcome

A finished run is not repeated, and an interrupted run resumes.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from data.durable_files import write_atomically
from launch.records.facts import TaskScore
from launch.records.result import read_result
from recipes import files
from recipes.problems import ProblemsError

ARGUMENTS = "runs.json"
SUMMARY = "summary.json"
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
    return (
        files.checked(TypeAdapter(Summary), files.read_json_object(path), path)
        if path.exists()
        else None
    )


def keep_arguments(out: Path, arguments: Sequence[str]) -> None:
    """Write the common arguments of the runs; refuse to go on with other ones. Raises ProblemsError."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / ARGUMENTS
    given = {"arguments": list(arguments)}
    if path.exists() and files.read_json_object(path) != given:
        came = f"{out} holds runs of other arguments"
        rule = "runs that are compared have the same ones"
        raise ProblemsError.of("--out", came, rule, "name another directory with --out")
    write_atomically(path, json.dumps(given, indent=1) + "\n")


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
    write_atomically(out / SUMMARY, json.dumps(asdict(summary), indent=1) + "\n")
    return summary


def ensemble(out: Path, members: Sequence[SeedOutcome]) -> tuple[TaskScore, ...]:
    """Score the seeds' mean probabilities over classes, choices, or positions of a span."""
    from data.tasks.corpus import splits_to_predict
    from launch.evaluation.finetuning_predictions import FOLDER, LOGITS, keep
    from recipes.catalog import load_resolved

    logits = {}
    splits = splits_to_predict(
        load_resolved(out / members[0].name / "recipe.yaml"), lambda line: None
    )
    for split in splits:
        own = [
            np.load(out / each.name / FOLDER / split.name / LOGITS) for each in members
        ]
        logits[split.name] = averaged(own)
    return keep(out / "ensemble", splits, logits)


def averaged(logits: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logarithm of the mean probabilities; logits are (n, C), or (n, S, 2) over S."""
    probabilities = [np.exp(x - x.max(1, keepdims=True)) for x in logits]
    shares = np.mean([x / x.sum(1, keepdims=True) for x in probabilities], axis=0)
    with np.errstate(divide="ignore"):  # of padding
        return np.log(shares)
