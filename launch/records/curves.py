"""Reference curves: what runs of one recipe came to under several seeds; files of them, and the watch by one.

A file holds the facts that decide the curve, what the runs were made with, and each run's figures by step.
Medians and bands are computed where they are shown.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from data.durable_files import write_atomically
from launch.records.facts import Entropies, Judgement, RunFacts, StepRecord
from launch.records.metrics import Records, ValidationRecord
from launch.records.reference import Reference, Series
from recipes import files
from recipes.families import LossFigure
from recipes.key_paths import CURVE, PLACES, differences, flatten
from recipes.problems import counted, some
from recipes.schema import Recipe

MOST_NAMED = 3  # keys


@dataclass(frozen=True)
class Curve:
    """The content of a curve's file.

    Attributes:
        curve_of: name of the recipe, table/row.
        facts: the keys that decide a curve (`CURVE`), with their values.
        entropies: of the validation text; they tell texts and vocabularies apart.
        made_by: hardware, precision, versions and commit of the runs, for a reader.
        runs: by seed.
        repeats: second runs of some seeds, in another precision or layout.
        misuses: first steps of runs with one mistake each, by its name, all of the seed `misused`.
    """

    curve_of: str
    facts: dict[str, Any]
    entropies: Entropies
    made_by: list[dict[str, Any]]
    runs: dict[int, Series]
    repeats: dict[int, Series] = field(default_factory=dict)
    misuses: dict[str, Series] = field(default_factory=dict)
    misused: int = 0

    @property
    def reference(self) -> Reference:
        return Reference(self.runs, self.misuses, self.repeats, self.misused)

    def why_not(self, recipe: Recipe, entropies: Entropies, given: object) -> str:
        """Say why a run is not to be judged by the curve; "": it is.

        `entropies`: unknown before the text is read. `given`: weights that it began with.
        """
        if given or recipe.branch:
            return f"it goes on from a run or from weights, {self.curve_of}'s curve from none"
        apart = differences(self.facts, facts_of(recipe))
        if self.entropies.same_text(entropies):
            apart = [each for each in apart if each[0] not in PLACES]
        elif entropies.unigram:
            apart.append(("unigram entropy", self.entropies.unigram, entropies.unigram))
        told = [f"{key}={now} is not the {was}" for key, was, now in apart]
        return f"{some(told, MOST_NAMED)} of {self.curve_of}'s curve" if told else ""


_FORM = TypeAdapter(Curve)


class RunFigures:
    """The figures of a run in its first `steps` steps, of which a judgement takes notice."""

    def __init__(self, figure: LossFigure, records: Records, steps: int) -> None:
        self._figure = figure
        self._loss = np.full(steps, np.nan)
        self._norm = self._loss.copy()
        self._validation: dict[int, float] = {}
        for step in records.steps:
            self.step(step)
        for validation in records.validations:
            self.validated(validation)

    def step(self, record: StepRecord) -> None:
        if record.step <= len(self._loss) and not record.skipped:
            self._loss[record.step - 1] = self._figure.of(record)
            self._norm[record.step - 1] = record.grad_norm

    def validated(self, record: ValidationRecord) -> bool:
        """Take a validation; return whether it counts, finite and within these steps."""
        loss = self._figure.of(record)
        if loss is None or record.step > len(self._loss):
            return False
        self._validation[record.step] = loss
        return True

    def until(self, step: int) -> Series:
        return Series(self._loss[:step], self._norm[:step], self._validation)


def facts_of(recipe: Recipe) -> dict[str, Any]:
    """Return the facts of a recipe that decide its curve, but for the seed and the text itself."""
    return {key: value for key, value in flatten(recipe.compared()) if key in CURVE}


def read(path: Path) -> Curve:
    """Read a curve. Raises FileError."""
    curve: Curve = files.checked(_FORM, files.read_json_object(path), path)
    lengths = set[int]()
    for run in curve.runs.values():
        lengths |= {len(run.loss), len(run.grad_norm)}
    if len(lengths) != 1:
        files.refuse(path, "has no runs, or runs of different lengths")
    return curve


def write(path: Path, curve: Curve) -> None:
    """Write the file of a curve, each series in a line."""
    text = json.dumps(_FORM.dump_python(curve, mode="json"), indent=1)
    lines = re.sub(r'\[[^][{"]+\]', lambda series: " ".join(series[0].split()), text)
    write_atomically(path, f"{lines}\n")


class ReferenceWatch:
    """Judges a run at each validation.

    Attributes:
        why_not: the reason why it is not to be judged; "": it is.
        reference: the runs that it is judged by.
        figures: its own so far.
    """

    def __init__(self, curve: Curve, run: RunFacts, given: object, before: Records):
        """Compare a run with the curve of its recipe.

        `given`: weights of the run's start; `before`: what a resumed run has recorded.
        """
        recipe = run.plan.recipe
        self.why_not = curve.why_not(recipe, run.entropies, given)
        self.reference = curve.reference
        steps = min(len(each.loss) for each in curve.runs.values())
        self.figures = RunFigures(recipe.model.figures[0], before, steps)
        self._seed = recipe.seed
        self._name = curve.curve_of

    def __str__(self) -> str:
        if self.why_not:
            return f"none: {self.why_not}"
        return f"curve of {self._name}, {counted(len(self.reference.runs), 'seed')}"

    def judge(self, record: ValidationRecord) -> Judgement | None:
        """Judge the run at a validation; None: after the curve's end, or the loss is not finite."""
        if not self.figures.validated(record):
            return None
        return self.reference.judge(self.figures.until(record.step), self._seed)
