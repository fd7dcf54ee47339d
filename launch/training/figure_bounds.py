"""A watch over the figures of steps."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial

from launch.records.facts import StepRecord
from launch.training.early_ends import Diverged
from launch.training.run import TrainingRun

RECENT = 100  # steps that give the bounds, and from one warning to the next
LEAST = 20  # steps before there are bounds
DEVIATIONS = 40  # median absolute deviations above the median, or the median once more
END_FACTOR = 10.0  # times the first loss, or 1 nat: no training ends above
LAST_STEPS = 10  # whose mean is the last loss


class FigureBounds:
    """A watch over the loss and the gradient norm of each step, against those of recent steps."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._quiet_until = 0  # step
        self._first = math.inf  # loss of this launch
        self._recent: dict[str, deque[float]] = defaultdict(
            partial(deque, maxlen=RECENT)
        )

    def after_step(self, record: StepRecord) -> None:
        """Take the figures of a step; say one that is far above, at most once in RECENT steps."""
        if record.skipped:
            return
        if self._first == math.inf and record.loss is not None:
            self._first = record.loss
        self._see_figure("loss", record.loss, record.step)
        self._see_figure("gradient norm", record.grad_norm, record.step)

    def _see_figure(self, name: str, value: float | None, step: int) -> None:
        if value is None:
            return
        recent = self._recent[name]
        if step >= self._quiet_until and is_far_above(value, recent):
            usual = statistics.median(recent)
            self._run.recorder.warn(
                f"the {name} of step {step} is {value:.4g}, far above the usual {usual:.4g}"
            )
            self._quiet_until = step + RECENT
        recent.append(value)

    def end(self, error: BaseException | None) -> None:
        """Compare the last loss with the first after all steps. Raises Diverged."""
        if error or self._run.done < self._run.recipe.steps:
            return
        last = [self._first, *self._recent["loss"]][-LAST_STEPS:]
        mean = statistics.fmean(last)
        if mean > END_FACTOR * max(self._first, 1.0):
            raise Diverged(
                f"the loss was {self._first:.4g} at first and is {mean:.4g} at the end"
            )


def is_far_above(value: float, recent: Sequence[float]) -> bool:
    """Check a value against a robust bound of those before."""
    if len(recent) < LEAST or value <= max(recent):
        return False
    median = statistics.median(recent)
    deviation = statistics.median(abs(each - median) for each in recent)
    return value > median + max(DEVIATIONS * deviation, median)
