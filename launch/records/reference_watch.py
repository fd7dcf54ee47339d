"""The watch over a run by the reference curve of its recipe."""

from __future__ import annotations

from pathlib import Path

from launch.records import curves
from launch.records.facts import Judgement, RunFacts
from launch.records.metrics import Records, ValidationRecord
from launch.records.reference import Reference
from recipes.problems import counted


class ReferenceWatch:
    """Judges a run at each validation.

    Attributes:
        why_not: the reason why it is not to be judged; "": it is.
        reference: the runs that it is judged by.
        figures: its own so far.
    """

    def __init__(self, file: Path, run: RunFacts, given: object, before: Records):
        """Read the file of the recipe's curve. Raises FileError.

        `given`: weights of the run's start; `before`: what a resumed run has recorded.
        """
        curve = curves.read(file)
        recipe = run.plan.recipe
        self.why_not = curve.why_not(recipe, run.entropies, given)
        self.reference = Reference(curve.runs, curve.misuses)
        steps = min(len(each.loss) for each in curve.runs.values())
        figure = recipe.model.figures[0]
        self.figures = curves.RunFigures(figure, before, steps)
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
