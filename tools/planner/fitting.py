"""Fit the planner's constants to published rows, leaving out one document at a time.

What is minimised is the mean |ln(predicted / published)| of the rows, rounded off below 5 %. A document of n
rows weighs as much as sqrt(n) single ones: rows of one document share its machine and its mistakes.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import yaml

from data.durable_files import write_atomically
from launch.console import terminal
from launch.planning.prediction import constants
from launch.planning.prediction.constants import Constants, Error, Fit, Quantity
from launch.planning.prediction.rank_memory import fullest_rank
from launch.planning.prediction.step_time import step_time
from tools.planner.cases import Case, by_document

# Constants of the time: where the search starts, and the range in which each stays physical.
RANGES = {
    "matrix": (0.75, 0.5, 1.2),
    "traffic": (1.0, 0.5, 2.5),
    "link": (0.75, 0.2, 1.0),
    "network": (0.5, 0.1, 1.0),
    "kernel_us": (15, 3, 25),
}
# Not fitted. Fragmentation: the median of the five logs that print both reserved and allocated memory
# (18B-log-n4 to 193B-log-n64 of other_documents.csv: 0.18 to 0.23). Depth: two steps of 32 of a kernel's
# loop; `matrix` and `traffic` make up for other values.
ASSUMED = {"fragmentation": 0.22, "depth": 64.0}
FIRST_STEP = 1.5  # factors by which the search varies a constant
LAST_STEP = 1.01
LEAST_GAIN = 1e-6
ROUND = 0.05  # of ln(predicted / published): smaller errors all count as about this
ERRED: tuple[Quantity, ...] = ("time", "memory")
Numbers = TypeVar("Numbers", Constants, Error)
HEADING = """\
# The planner's constants. What each is: launch/planning/prediction/constants.py. Fitted by
#     python tools/fit_planner.py --refit
# constants: on all documents; left_out: without that one, by which its own rows are predicted; errors: of
# those predictions; time: in half precision, by software of which several documents print times (software);
# unseen: by other software; fitted_on: rows with a time, and with a memory, which no constant is fitted to.
# waiting: of published rows that are not among these, in which the GPU waits for the host; kept by --refit.
"""


@dataclass(frozen=True)
class Ratio:
    """A predicted number of a row, and the published one."""

    case: Case
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """The relative error: predicted / published - 1."""
        return self.predicted / self.published - 1


def error_of(compared: Sequence[Ratio]) -> Error:
    """Summarise the errors of one row or more."""
    sizes = sorted(abs(ratio.error) for ratio in compared)
    return Error(
        rows=len(sizes),
        median=statistics.median(sizes),
        percentile_90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        worst=sizes[-1],
        bias=statistics.median(ratio.predicted / ratio.published for ratio in compared),
        documents=len({ratio.case.document for ratio in compared}),
    )


def by_kind(
    quantity: Quantity, compared: Iterable[Ratio], known: Fit
) -> dict[str, Error]:
    """Summarise the errors of ratios of a quantity, by the keys of predictions that bear them."""
    kinds: dict[str, list[Ratio]] = {}
    for ratio in compared:
        work, _ = ratio.case.step
        kind = known.kind(quantity, work.precision, work.software.name)
        kinds.setdefault(kind, []).append(ratio)
    return {kind: error_of(own) for kind, own in kinds.items()}


def ratios(quantity: str, cases: Iterable[Case], trial: Constants) -> list[Ratio]:
    """Predict one of `cases.QUANTITIES` of every row with a published number: seconds or bytes."""
    compared = []
    for case in cases:
        printed = case.printed(quantity)
        if printed:
            compared.append(Ratio(case, predicted(quantity, case, trial), printed))
    return compared


def predicted(quantity: str, case: Case, trial: Constants) -> float:
    """Predict the seconds of a step, its allocated bytes, or its cached ones as they were asked for."""
    work, node = case.step
    if quantity == "time":
        return step_time(work, node, trial).total
    rank = fullest_rank(work, node.gpu, trial)
    if quantity == "allocated":
        return rank.allocated
    return rank.cached(node.gpu.memory_bytes) + rank.context * case.by_device


def initial_constants() -> Constants:
    """Return the constants from which the search starts."""
    return Constants(**{name: values[0] for name, values in RANGES.items()}, **ASSUMED)


def in_several(cases: Iterable[Case]) -> list[str]:
    """Return the software of which several documents print times."""
    timed = (case for case in cases if case.printed("time"))
    pairs = {(case.step[0].software.name, case.document) for case in timed}
    number = Counter(name for name, _ in pairs)
    return sorted(name for name in number if number[name] > 1)


def refit(cases: Sequence[Case]) -> None:
    """Fit the constants, on all documents and without each, and write them."""
    documents = by_document(cases)
    terminal.say(f"fitting {len(RANGES)} constants {len(documents) + 1} times …")
    others = {}
    for left_out in ("", *documents):
        others[left_out] = dict(documents)
        others[left_out].pop(left_out, None)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        fitted = map(_rounded, pool.map(fit, others.values()))
        fits = dict(zip(others, fitted, strict=True))
    rows = {}
    for name, own in documents.items():
        counts = []
        for quantity in ERRED:
            counts.append(sum(case.printed(quantity) is not None for case in own))
        if any(counts):
            rows[name] = counts
    known = Fit(
        constants=fits[""],
        errors={},
        software=in_several(cases),
        waiting=constants.fitted().waiting,
        fitted_on=rows,
        left_out={name: fits[name] for name in rows},
    )
    for quantity in ERRED:
        unseen: list[Ratio] = []
        for name, own in documents.items():
            unseen += ratios(quantity, own, fits[name])
        for kind, error in by_kind(quantity, unseen, known).items():
            known.errors[kind] = _rounded(error)
    text = yaml.safe_dump(
        known.model_dump(), sort_keys=False, width=110, default_flow_style=None
    )
    write_atomically(constants.FILE, HEADING + text)
    constants.fitted.cache_clear()
    constants.fitted_constants.cache_clear()
    print(f"wrote {constants.FILE}\n")


def _rounded(numbers: Numbers) -> Numbers:
    return type(numbers).model_validate(
        {name: round(value, 4) for name, value in numbers.model_dump().items()}
    )


def _distance(ratio: Ratio) -> float:
    return math.hypot(math.log(ratio.predicted / ratio.published), ROUND)


def distance(documents: Mapping[str, Sequence[Case]], trial: Constants) -> float:
    """Return what is minimised: the mean distance of the rows, by document."""
    total = 0.0
    weights = 0.0
    for cases in documents.values():
        own = ratios("time", cases, trial)
        if own:
            weight = math.sqrt(len(own))
            total += weight * (sum(map(_distance, own)) / len(own))
            weights += weight
    return total / (weights or 1.0)


def fit(documents: Mapping[str, Sequence[Case]]) -> Constants:
    """Fit the constants to the times of all given documents.

    By the pattern search of Hooke and Jeeves (1961), on logarithms.
    """
    current = initial_constants()

    def changed(values: Mapping[str, float]) -> Constants:
        clamped = {}
        for name, value in values.items():
            _, least, most = RANGES[name]
            clamped[name] = min(most, max(least, value))
        return current.model_copy(update=clamped)

    best = distance(documents, current)
    factor = FIRST_STEP
    while factor > LAST_STEP:
        before = best
        base = current
        for name in RANGES:
            for step in (factor, 1 / factor):
                trial = changed({name: getattr(current, name) * step})
                now = distance(documents, trial)
                if now < best - LEAST_GAIN:
                    current = trial
                    best = now
                    break
        # once more in the direction that all these steps took together
        if best < before:
            further = {}
            for name in RANGES:
                further[name] = getattr(current, name) ** 2 / getattr(base, name)
            trial = changed(further)
            now = distance(documents, trial)
            if now < best:
                current = trial
                best = now
        else:
            factor = math.sqrt(factor)
    return current
