"""Curves small enough for a page, and where two of them part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.reports.runs import Points, Run

MOST_POINTS = 1000  # of one curve
PAGE_POINTS = 12_000  # of all curves of one figure together

# Relative difference of two losses that the precision explains. fp32: `compare_layouts` measures 1.5e-7
# between layouts after 20 steps, which training amplifies; fp16 and bf16: one unit in the last place of the
# activations (11 and 8 significant bits).
ROUNDING = {"fp32": 2e-6, "fp16": 2.0**-11, "bf16": 2.0**-8}


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: equal runs of neighbours, each replaced by its mean."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    buckets = (points[start : start + size] for start in range(0, len(points), size))
    return [(_mean([x for x, _ in bucket]), _mean([y for _, y in bucket])) for bucket in buckets]


def points_per_curve(curves: int) -> int:
    """So that many curves stay a small page together."""
    return max(50, min(MOST_POINTS, PAGE_POINTS // max(1, curves)))


@dataclass(frozen=True)
class Parting:
    """How the losses of two runs differ over the steps that both have.

    Differences are absolute, in nats per token.

    Attributes:
        steps: how many they have in common.
        tolerance: the relative difference that the precision explains.
        first: step and difference where it first exceeds the tolerance.
        largest: step and difference; None where there is no common step.
    """

    steps: int
    tolerance: float
    first: tuple[float, float] | None
    largest: tuple[float, float] | None


def parting(a: Run, b: Run, first: Points, second: Points) -> Parting:
    """Compare a curve of two runs."""
    losses, others = dict(first), dict(second)
    tolerance = max(rounding(a), rounding(b))
    apart = differences(first, second)
    too_far = ((step, by) for step, by in apart if by > tolerance * max(abs(losses[step]), abs(others[step])))
    return Parting(
        len(apart), tolerance, next(too_far, None), max(apart, key=lambda pair: pair[1], default=None)
    )


def differences(first: Points, second: Points) -> Points:
    """(step, absolute difference) of the steps that both curves have."""
    losses, others = dict(first), dict(second)
    return [(step, abs(losses[step] - others[step])) for step in sorted(losses.keys() & others.keys())]


def rounding(run: Run) -> float:
    """The relative difference that the run's precision explains."""
    precision = run.result.precision or (run.recipe.precision if run.recipe else "fp32")
    return ROUNDING.get(precision, ROUNDING["fp32"])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
