"""Run several fine-tunings of one task: a grid, seeds, their median and their ensemble.

RoBERTa's procedure (Liu et al. 2019, section 5.1): try batches and learning rates with one seed, train the
best on the dev set with several seeds, and report their median. Each run is a separate process. Files:

    OUT/batch32-lr2e-05-seed1234/        a run directory, with OUT/batch32-lr2e-05-seed1234.log
    OUT/ensemble/SPLIT/                  predictions of all seeds together
    OUT/runs.json, OUT/summary.json      arguments and outcome

A finished run is not repeated, and an interrupted run resumes.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.durable_files import write_atomically
from data.tasks.corpus import splits_to_predict
from launch.evaluation.finetuning_predictions import FOLDER, LOGITS, keep
from launch.evaluation.finetuning_summary import MEMBERS, Summary, Trial, TrialOutcome, write
from launch.ranks.ending import Failed
from launch.records.facts import TaskScore
from launch.records.result import read_result
from recipes import files
from recipes.catalog import load_resolved
from recipes.problems import Problem, ProblemsError
from recipes.tasks import TaskFacts

BATCHES, RATES = (16, 32), (1e-5, 2e-5, 3e-5)  # RoBERTa's grid for GLUE
ARGUMENTS = "runs.json"


@dataclass(frozen=True)
class Runs:
    """Command, directory and devices of several runs.

    Attributes:
        out: parent directory of the runs.
        script, arguments: the command and the common arguments of all runs.
        devices: accelerators for each simultaneous run; () for a run without a choice of devices.
    """

    out: Path
    script: str
    arguments: tuple[str, ...]
    ranks: int
    devices: tuple[tuple[str, ...], ...]
    facts: TaskFacts
    say: Callable[[str], None]

    @property
    def metric(self) -> str:
        """Return the metric that compares trials."""
        return "f1" if self.facts.head == "span" else "accuracy"

    def finished(self, trial: Trial) -> TrialOutcome | None:
        """Return the outcome of an earlier finished trial; None without one."""
        path = self.out / trial.name / "result.json"
        if not path.exists():
            return None
        result = read_result(path)
        scores = result.task_scores
        return TrialOutcome(**vars(trial), scores=scores) if result.status == "ok" and scores else None

    def make(self, trials: Sequence[Trial]) -> list[TrialOutcome]:
        """Run the trials side by side as devices allow, and say each result; do not repeat finished ones.

        After an error or Ctrl-C no further trial begins; running ones are awaited.
        """
        free: queue.Queue[tuple[str, ...]] = queue.Queue()
        for devices in self.devices:
            free.put(devices)
        done = itertools.count(1)

        def one(trial: Trial) -> TrialOutcome:
            found, when = self.finished(trial), ", made before"
            if found is None:
                devices = free.get()
                try:
                    found, when = self._made(trial, devices), ""
                finally:
                    free.put(devices)
            result = found.problem or found.scores[0]
            self.say(f"{found.name}: {result}{when}; {next(done)} of {len(trials)}")
            return found

        with ThreadPoolExecutor(len(self.devices)) as pool:
            try:
                return list(pool.map(one, trials))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _made(self, trial: Trial, devices: tuple[str, ...]) -> TrialOutcome:
        directory, log = self.out / trial.name, self.out / f"{trial.name}.log"
        place = f"--rdzv_backend c10d --rdzv_endpoint localhost:0 --nproc_per_node {self.ranks}"
        launcher = ["-m", "torch.distributed.run", *place.split()] if self.ranks > 1 else []
        own = [*trial.flags, "--out", str(directory), "--resume"]
        command = [sys.executable, *launcher, self.script, *self.arguments, *own]
        env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {})}
        streams: dict[str, Any] = dict(stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        with log.open("ab") as file:
            ended = subprocess.run(command, env=env, stdout=file, **streams)
        if found := self.finished(trial):
            return found
        return TrialOutcome(**vars(trial), problem=f"ended with code {ended.returncode}, see {log}")


def keep_arguments(out: Path, arguments: Sequence[str]) -> None:
    """Write the common arguments of the runs; refuse to go on with other ones. Raises ProblemsError."""
    out.mkdir(parents=True, exist_ok=True)
    path, given = out / ARGUMENTS, {"arguments": list(arguments)}
    if path.exists() and files.read_json_object(path) != given:
        came, rule = f"{out} holds runs of other arguments", "runs that are compared have the same ones"
        raise ProblemsError([Problem("--out", came, rule, "name another directory with --out")])
    write_atomically(path, json.dumps(given, indent=1) + "\n")


def procedure(runs: Runs, first: Trial, *, search: bool, seeds: int, average: bool) -> Summary:
    """Run grid (`search`), seeds, median and ensemble (`average`); write and return the summary.

    Raises Failed if no trial of the grid, or no seed, has scores.
    """
    keep_arguments(runs.out, runs.arguments)
    found: tuple[TrialOutcome, ...] = ()
    if search:
        grid = itertools.product(BATCHES, RATES)
        found = tuple(runs.make([Trial(batch, lr, first.seed) for batch, lr in grid]))
        first = max(_scored(found), key=lambda each: each.value(runs.metric)).trial
        runs.say(f"best by {runs.metric} on dev: {first.name}")
    made = runs.make([replace(first, seed=first.seed + number) for number in range(seeds)])
    sound = _scored(made)
    summary = Summary(runs.metric, tuple(made), dict(medians(sound)), found)
    if average:
        members = [each.trial for each in sound]
        joined = ensemble(runs.out, members) if len(members) >= MEMBERS else ()
        summary = replace(summary, ensemble=joined, ensemble_of=len(members))
    write(summary, runs.out)
    return summary


def _scored(made: Sequence[TrialOutcome]) -> list[TrialOutcome]:
    sound = [each for each in made if each.scores]
    if not sound:
        raise Failed("\n".join(f"{each.name}: {each.problem}" for each in made))
    return sound


def medians(made: Sequence[TrialOutcome]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield (split, metric -> median) for every split with labels."""
    for scores in zip(*(each.scores for each in made), strict=True):
        if names := list(scores[0].metrics):
            values = {name: statistics.median(score.metrics[name] for score in scores) for name in names}
            yield scores[0].split, values


def ensemble(out: Path, trials: Sequence[Trial]) -> tuple[TaskScore, ...]:
    """Score the trials' mean probabilities over classes, choices, or positions of a span."""
    recipe = load_resolved(out / trials[0].name / "recipe.yaml")
    splits = splits_to_predict(recipe, lambda line: None)
    logits = {
        split.name: averaged([np.load(out / trial.name / FOLDER / split.name / LOGITS) for trial in trials])
        for split in splits
    }
    return keep(out / "ensemble", splits, logits)


def averaged(logits: Sequence[np.ndarray]) -> np.ndarray:
    """Return the logarithm of the mean probabilities; logits are (n, C), or (n, S, 2) over S."""
    probabilities = [np.exp(x - x.max(1, keepdims=True)) for x in logits]
    shares = np.mean([x / x.sum(1, keepdims=True) for x in probabilities], axis=0)
    with np.errstate(divide="ignore"):  # of padding
        return np.log(shares)


def devices_of_runs(accelerators: int, ranks: int, side_by_side: int | None) -> tuple[tuple[str, ...], ...]:
    """Return the accelerators of each simultaneous run; without accelerators `side_by_side` runs, or one.

    Raises ProblemsError if there are too few accelerators.
    """
    if not accelerators:
        return ((),) * (side_by_side or 1)
    most = accelerators // ranks
    if not 0 < (side_by_side or 1) <= most:
        came = f"{side_by_side or 1} at once of {ranks} processes each"
        rule = f"this machine has {accelerators} accelerators"
        fix = "lower --ranks or --side_by_side"
        raise ProblemsError([Problem("--side_by_side", came, rule, fix)])
    shown = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    names = shown or [str(number) for number in range(accelerators)]
    return tuple(tuple(names[i * ranks : (i + 1) * ranks]) for i in range(side_by_side or most))
