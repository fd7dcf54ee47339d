"""The watch over a run by the reference curve of its recipe."""

from __future__ import annotations

from pathlib import Path

from launch.records import curves
from launch.records.curves import Points
from launch.records.facts import Judgement, RunFacts, StepRecord
from launch.records.metrics import Records, ValidationRecord
from launch.records.reference import Reference


class ReferenceWatch:
    """Judges a run at each validation.

    Attributes:
        standing: tells whether the run is of the curve's recipe; else it is not to be judged.
        reference: the runs that it is judged by.
    """

    def __init__(self, file: Path, run: RunFacts, *, given_weights: bool) -> None:
        """Read the file of the recipe's curve. Raises FileError."""
        curve, self._misuses = curves.read(file)
        self.standing = curve.standing(run, given_weights=given_weights)
        runs = {seed: points.series for seed, points in curve.runs.items()}
        misuses = {name: points.series for name, points in self._misuses.items()}
        self.reference = Reference(runs, misuses)
        self._last = curve.steps
        recipe = run.plan.recipe
        self._figure = recipe.model.figures[0]
        self._seed = recipe.seed
        self._steps: list[StepRecord] = []
        self._validations: list[ValidationRecord] = []
        self._warned: tuple[object, ...] = ()

    def begin(self, records: Records) -> None:
        """Take the steps before a resume."""
        self._steps = [*records.steps]
        self._validations = [*records.validations]

    def step(self, record: StepRecord) -> None:
        if record.step <= self._last:
            self._steps.append(record)

    def judge(self, record: ValidationRecord) -> Judgement | None:
        """Judge the run at a validation; None: after the curve's end, or the loss is not finite."""
        self._validations.append(record)
        if self._figure.of(record) is None or record.step > self._last:
            return None
        records = Records(tuple(self._steps), tuple(self._validations))
        run = Points.of(records, self._figure, record.step)
        return self.reference.judge(run.series, self._seed)

    def news(self, judged: Judgement) -> str | None:
        """Word that a run is outside of the curve, and what the likeliest cause is; None: it was said."""
        outside = (judged.since, judged.figure, judged.causes)
        if judged.since is None or outside == self._warned:
            return None
        self._warned = outside
        said = f"step {judged.step}: {judged}"
        for first in judged.causes[:1]:
            said += f" ({first}: {self._misuses[first].about})"
        return said
