"""Fits the planner's constants to published rows, leaving one document out at a time.

What is minimised is the mean |ln(predicted / published)| of the rows, rounded off below 5 %. A document of n
rows weighs as much as sqrt(n) single ones: rows of one document share its machine and its mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from launch.planning.fitting.cases import Case
from launch.planning.prediction.constants import Constants
from launch.planning.prediction.hardware import GIB
from launch.planning.prediction.rank_memory import fullest
from launch.planning.prediction.step_time import step_time

# Constants of the time with where the search starts and the range in which each stays physical.
TIME = {
    "matrix": (0.75, 0.5, 1.2), "traffic": (1.0, 0.5, 2.5), "link": (0.75, 0.2, 1.0),
    "network": (0.5, 0.1, 1.0), "kernel_us": (15, 3, 25),
}  # fmt: skip
MEMORY = {"idle": (0.75, 0.01, 1.0)}
# Not fitted. Fragmentation: blocks of 2 MiB that are not filled; no document prints what would tell. Depth:
# two steps of 32 of a kernel's loop; `matrix` and `traffic` make up for other values.
ASSUMED = {"fragmentation": 0.03, "depth": 64.0}
FIRST_STEP, LAST_STEP, LEAST_GAIN = 1.5, 1.01, 1e-6  # factors by which the search varies a constant
ROUND = 0.05  # of ln(predicted / published): smaller errors all count as about this


@dataclass(frozen=True)
class Ratio:
    """A row's prediction over what its source printed."""

    case: Case
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """Relative error: predicted / published - 1."""
        return self.predicted / self.published - 1


def time_ratios(cases: Iterable[Case], constants: Constants) -> list[Ratio]:
    """Of every row whose time is compared, in seconds."""
    return [
        Ratio(case, step_time(*case.step, constants).total, case.seconds)
        for case in cases
        if case.work and case.seconds and not case.leaves_out("time")
    ]


def memory_ratios(cases: Iterable[Case], constants: Constants) -> list[Ratio]:
    """Of every row whose cached memory is printed, in bytes."""
    return [
        Ratio(case, predicted_memory(case, constants), case.cached)
        for case in cases
        if case.work and case.cached and not case.leaves_out("memory")
    ]


def predicted_memory(case: Case, constants: Constants) -> float:
    """Bytes that torch would report as cached, with the context where the device was asked."""
    work, node = case.step
    cached = fullest(work, node.gpu, constants).cached(node.gpu.memory_bytes)
    return cached + (node.gpu.context_gib * GIB if case.by_device else 0.0)


def start() -> Constants:
    """Where the search begins."""
    return Constants(**{name: first for name, (first, _, _) in {**TIME, **MEMORY}.items()}, **ASSUMED)


def fit(documents: Mapping[str, Sequence[Case]]) -> Constants:
    """The constants of all documents given."""
    constants = _search(start(), TIME, documents, time_ratios)
    return _search(constants, MEMORY, documents, memory_ratios)


def fit_leaving_out(documents: Mapping[str, Sequence[Case]], processes: int) -> dict[str, Constants]:
    """For each document the constants of the others, and under "" those of all."""
    rest = {
        name: {key: cases for key, cases in documents.items() if key != name} for name in ("", *documents)
    }
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(rest, pool.map(fit, rest.values()), strict=True))


def _distance(ratio: Ratio) -> float:
    return math.hypot(math.log(ratio.predicted / ratio.published), ROUND)


def _search(
    constants: Constants,
    ranges: Mapping[str, tuple[float, float, float]],
    documents: Mapping[str, Sequence[Case]],
    ratios: Callable[[Iterable[Case], Constants], list[Ratio]],
) -> Constants:
    """Hooke and Jeeves' pattern search (1961) over the constants' logarithms."""

    def distance(tried: Constants) -> float:
        each = [ratios(cases, tried) for cases in documents.values()]
        means = [
            (sum(_distance(ratio) for ratio in own) / len(own), math.sqrt(len(own))) for own in each if own
        ]
        return sum(mean * weight for mean, weight in means) / (sum(weight for _, weight in means) or 1.0)

    def clamped(name: str, value: float) -> float:
        _, least, most = ranges[name]
        return min(most, max(least, value))

    best, factor = distance(constants), FIRST_STEP
    while factor > LAST_STEP:
        before, base = best, constants
        for name in ranges:
            for step in (factor, 1 / factor):
                tried = constants.model_copy(update={name: clamped(name, getattr(constants, name) * step)})
                if (now := distance(tried)) < best - LEAST_GAIN:
                    constants, best = tried, now
                    break
        if best < before:  # once more in the direction that all these steps took together
            ahead = {
                name: clamped(name, getattr(constants, name) ** 2 / getattr(base, name)) for name in ranges
            }
            if (now := distance(tried := constants.model_copy(update=ahead))) < best:
                constants, best = tried, now
        else:
            factor = math.sqrt(factor)
    return constants
