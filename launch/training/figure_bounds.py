"""Bounds of losses and gradient norms by the steps before, and of the last loss by the first."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence

from launch.records.facts import StepOutcome
from launch.training.early_ends import Diverged

RECENT = 100  # steps that give the bounds, and from one warning to the next
LEAST = 20  # steps before there are bounds
DEVIATIONS = 40  # median absolute deviations above the median
LOSS_MARGIN = 1.0  # nats above the median in any case
NORM_FACTOR = 10.0  # times the median in any case
END_FACTOR = 10.0  # times the first loss: no training ends above
LAST_STEPS = 10  # whose mean is the last loss


class FigureBounds:
    """A watch over the loss and the gradient norm of each step, against those of recent steps."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._quiet_until = 0  # step
        self._first: float | None = None  # loss of this launch
        self._losses: deque[float] = deque(maxlen=RECENT)
        self._norms: deque[float] = deque(maxlen=RECENT)

    def see(self, step: int, outcome: StepOutcome) -> None:
        """Take the figures of a step; say one that is far above, at most once in RECENT steps."""
        if outcome.skipped:
            return
        if self._first is None:
            self._first = outcome.loss
        self._compare(step, "loss", outcome.loss, self._losses, LOSS_MARGIN)
        if outcome.grad_norm is not None:
            margin = (NORM_FACTOR - 1) * statistics.median(self._norms or [outcome.grad_norm])
            self._compare(step, "gradient norm", outcome.grad_norm, self._norms, margin)

    def check_end(self) -> None:
        """Compare the last loss with the first. Raises Diverged."""
        last = [*self._losses][-LAST_STEPS:]
        if self._first is None or not last:
            return
        mean = statistics.fmean(last)
        if mean > END_FACTOR * max(self._first, LOSS_MARGIN):
            raise Diverged(f"the loss was {self._first:.4g} at first and is {mean:.4g} at the end")

    def _compare(self, step: int, name: str, value: float, recent: deque[float], margin: float) -> None:
        if len(recent) >= LEAST and step >= self._quiet_until:
            bound = upper_bound(recent, margin)
            if value > bound:
                median = statistics.median(recent)
                self._say(
                    f"WARNING: the {name} of step {step} is {value:.4g}, far above the {median:.4g} of the "
                    f"last {len(recent)} steps (bound {bound:.4g})"
                )
                self._quiet_until = step + RECENT
        if math.isfinite(value):
            recent.append(value)


def upper_bound(values: Sequence[float], margin: float) -> float:
    """Return DEVIATIONS median absolute deviations above the median, `margin` at the least."""
    median = statistics.median(values)
    deviation = statistics.median(abs(value - median) for value in values)
    return median + max(DEVIATIONS * deviation, margin)
