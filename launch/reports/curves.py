"""Curves small enough for a page, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from launch.records.loss_plot import mean
from launch.reports.runs import Points

MOST_POINTS = 1000  # of one curve
PAGE_POINTS = 12_000  # of all curves of one figure together


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` points: equal runs of neighbours, each replaced by its mean."""
    if len(points) <= most:
        return points
    size = ceil(len(points) / most)
    buckets = (zip(*points[start : start + size], strict=True) for start in range(0, len(points), size))
    return [(mean(steps), mean(values)) for steps, values in buckets]


def points_per_curve(curves: int) -> int:
    """So that many curves stay a small page together."""
    return max(50, min(MOST_POINTS, PAGE_POINTS // max(1, curves)))


def differences(first: Mapping[float, float], second: Mapping[float, float]) -> Points:
    """(step, absolute difference) of the steps that both curves have."""
    return [(step, abs(first[step] - second[step])) for step in sorted(first.keys() & second.keys())]
