"""Curves small enough for a page, and where two of them part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.reports.runs import Run
from launch.runs.loss_plot import curve, moving_average

MOST_POINTS = 1000  # of one curve
PAGE_POINTS = 12_000  # of all curves of one figure together
Points = list[tuple[float, float]]

# Relative difference of two losses that the precision explains. fp32: `compare_layouts` measures 1.5e-7 between layouts after 20 steps,
# which training amplifies; fp16 and bf16: one unit in the last place of the activations (11 and 8 significant bits).
ROUNDING = {"fp32": 2e-6, "fp16": 2.0**-11, "bf16": 2.0**-8}


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> Points:
    """At most `most` points: equal runs of neighbours, each replaced by the mean of its steps and of its values."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / most)
    buckets = (points[start : start + size] for start in range(0, len(points), size))
    return [(_mean([x for x, _ in bucket]), _mean([y for _, y in bucket])) for bucket in buckets]


def points_per_curve(curves: int) -> int:
    """So that many curves stay a small page together."""
    return max(50, min(MOST_POINTS, PAGE_POINTS // max(1, curves)))


def training(run: Run, smooth: bool = True) -> Points:
    """(step, loss in nats per token) of every recorded step with a finite loss; of a BERT, per masked token."""
    points = curve(run.records, "step", run.loss_key)
    if not smooth:
        return list(points)
    return list(zip([step for step, _ in points], moving_average([loss for _, loss in points]), strict=True))


def validation(run: Run) -> Points:
    return list(curve(run.records, "validation", run.loss_key))


def seconds(run: Run) -> Points:
    """(step, seconds of wall time)."""
    return [(step, value) for step, value in curve(run.records, "step", "seconds") if value > 0]


@dataclass(frozen=True)
class Parting:
    """How the losses of two runs differ over the steps that both have. Differences are absolute, in nats per token."""

    steps: int
    tolerance: float  # relative
    first: tuple[int, float] | None  # step and difference where it first exceeds the tolerance
    largest: tuple[int, float] | None  # step and difference; None where there is no common step


def parting(a: Run, b: Run, kind: str = "step") -> Parting:
    """Compare the training losses of every step, or with `kind` "validation" those on held-out text."""
    losses = [dict(curve(run.records, kind, run.loss_key)) for run in (a, b)]
    tolerance = max(rounding(a), rounding(b))
    common = sorted(set(losses[0]) & set(losses[1]))
    apart = [(step, abs(losses[0][step] - losses[1][step])) for step in common]
    first = next(
        ((step, d) for step, d in apart if d > tolerance * max(abs(losses[0][step]), abs(losses[1][step]))),
        None,
    )
    return Parting(len(common), tolerance, first, max(apart, key=lambda pair: pair[1], default=None))


def differences(a: Run, b: Run) -> Points:
    """(step, absolute difference of the training losses) where both runs have the step and differ in it."""
    first, second = (dict(training(run, smooth=False)) for run in (a, b))
    return [
        (step, abs(first[step] - second[step]))
        for step in sorted(first.keys() & second.keys())
        if first[step] != second[step]
    ]


def rounding(run: Run) -> float:
    precision = str(run.row.get("precision") or (run.recipe.precision if run.recipe else "fp32")).split(" ")[
        0
    ]
    return ROUNDING.get(precision, ROUNDING["fp32"])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
