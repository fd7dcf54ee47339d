"""The judgement of a run by runs of the same recipe.

Judged are the means over `WINDOW` steps of the training loss and of the gradient norm's logarithm, and the
validation losses. A run of a seed that the reference has differs from that one by rounding alone, which
repeats of a seed in other precisions bound. A run of another seed has other batches: it may be as far as
`SCATTERS` standard deviations of the seeds from their median. Both bounds were chosen on the packaged recipes
(docs/design.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from launch.records.facts import Finite, Judgement

WINDOW = 10
# standard deviations of the seeds: a norm has spikes in few of ten runs
SCATTERS = {"training loss": 8.0, "gradient norm": 12.0, "validation loss": 8.0}
# steps before and behind one whose variances are averaged with its own: ten seeds tell that badly
AROUND = 15
# largest differences of repeats up to a step; a spike of the norm comes a few steps earlier or later
ROUNDINGS = {"training loss": 4.0, "gradient norm": 6.0, "validation loss": 4.0}
# before repeats differ: of a loss in nats, of a norm's logarithm
LEAST_BOUND = {"training loss": 2e-3, "gradient norm": 0.02, "validation loss": 2e-3}
# by which deviations count in the comparison with misuses
WEIGHTS = {"training loss": 1.0, "gradient norm": 0.5, "validation loss": 3.0}
MOST_CAUSES = 3
UNLIKE = 0.9  # distance from which a misuse explains nothing; two unrelated deviations have 0.7 to 1
_NUMBERS = TypeAdapter(list[Finite | None])


def parsed(values: object) -> np.ndarray:
    """Return a list of JSON as an array, null as nan."""
    return np.array(_NUMBERS.validate_python(values), dtype=float)


def listed(values: np.ndarray) -> list[float | None]:
    """Return numbers of five digits for JSON, None for nan."""
    return [None if np.isnan(each) else float(f"{each:.5g}") for each in values]


# by optimizer step, step 1 first; nan where a step was skipped
Figures = Annotated[np.ndarray, PlainValidator(parsed), PlainSerializer(listed)]


@dataclass(frozen=True)
class Series:
    """The figures of one run."""

    loss: Figures
    grad_norm: Figures
    validation: Mapping[int, Finite]

    def judged(self, steps: int) -> dict[str, np.ndarray]:
        """Return each judged figure from step 0 to `steps`, (steps + 1,), nan where it is not known."""
        loss, norm, held_out = np.full((3, steps + 1), np.nan)
        known = min(steps, len(self.loss))
        loss[1 : known + 1] = self.loss[:known]
        norm[1 : known + 1] = np.log(self.grad_norm[:known])
        for step, value in self.validation.items():
            if step <= steps:
                held_out[step] = value
        figures = (_means(loss, WINDOW - 1), _means(norm, WINDOW - 1), held_out)
        return dict(zip(LEAST_BOUND, figures, strict=True))


@dataclass(frozen=True)
class Reference:
    """Runs of one recipe.

    Attributes:
        runs: by seed.
        repeats: second runs of some seeds, in another precision.
        misuses: the beginnings of runs with a mistake each, by its name, of the seed `misused`.
    """

    runs: Mapping[int, Series]
    misuses: Mapping[str, Series]
    repeats: Mapping[int, Series]
    misused: int

    @cached_property
    def _of_seeds(self) -> dict[str, np.ndarray]:
        """Each judged figure by step, (seeds, steps + 1)."""
        steps = min(len(each.loss) for each in self.runs.values())
        judged = [[*each.judged(steps).values()] for each in self.runs.values()]
        return dict(zip(LEAST_BOUND, np.stack(judged, axis=1), strict=True))

    def expected(
        self, name: str, seed: int | None, steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what a figure is by step, and how far from it a sound run may be, each (steps + 1,).

        `seed` None: of none that the reference has.
        """
        of_seeds = self._of_seeds[name][:, : steps + 1]
        variance = _means(of_seeds.var(0, ddof=1), AROUND, AROUND)
        scatter = SCATTERS[name] * np.sqrt(variance)
        if seed is None or seed not in self.runs or not self.repeats:
            return np.median(of_seeds, 0), scatter
        largest = np.zeros(steps + 1)
        for repeated, repeat in self.repeats.items():
            apart = repeat.judged(steps)[name] - self.runs[repeated].judged(steps)[name]
            largest = np.fmax(largest, np.fmax.accumulate(np.abs(apart)))
        bound = LEAST_BOUND[name] + ROUNDINGS[name] * largest
        return self.runs[seed].judged(steps)[name], np.fmin(bound, scatter)

    def judge(self, run: Series, seed: int) -> Judgement:
        """Judge a run of `seed` with validations, no longer than these, at its last one."""
        steps = len(run.loss)
        # a skipped step takes its batch along, so that all later ones have other batches
        like = None if np.isnan(run.loss).any() else seed
        compared = "validation loss"
        if np.isnan(self._of_seeds[compared][:, steps]).any():
            compared = "training loss"
        outside = dict[str, tuple[int, float]]()
        difference = 0.0
        for name, own in run.judged(steps).items():
            center, bound = self.expected(name, like, steps)
            apart = own - center
            beyond = np.flatnonzero(np.abs(apart) > bound)
            if len(beyond):
                outside[name] = int(beyond[0]), float(apart[beyond[-1]])
            if name == compared:
                difference = float(apart[-1])
        spread = float(np.ptp(self._of_seeds[compared][:, steps])) / 2
        judged = Judgement(steps, difference, spread, compared=compared)
        if not outside:
            return judged
        name, (_, apart) = next(iter(outside.items()))
        return replace(
            judged,
            since=min(outside.values())[0],
            figure=name,
            apart=math.exp(apart) if name == "gradient norm" else apart,
            causes=self.causes(run, like),
        )

    def causes(self, run: Series, seed: int | None) -> tuple[str, ...]:
        """Return the misuses whose deviations are most like the run's, the likeliest first."""
        distances = dict[str, float]()
        for name, misuse in self.misuses.items():
            steps = min(len(run.loss), len(misuse.loss))
            own = self._deviation(run, seed, steps)
            other = self._deviation(misuse, self.misused, steps)
            known = np.isfinite(own) & np.isfinite(other)
            lengths = np.linalg.norm(own[known]) + np.linalg.norm(other[known])
            apart = np.linalg.norm(own[known] - other[known])
            distances[name] = float(apart / lengths)
        likely = [name for name in distances if distances[name] < UNLIKE]
        return tuple(sorted(likely, key=distances.__getitem__)[:MOST_CAUSES])

    def _deviation(self, run: Series, seed: int | None, steps: int) -> np.ndarray:
        """Return the weighted differences from what is expected, training losses first."""
        own = run.judged(steps)
        apart = []
        for name, weight in WEIGHTS.items():
            center, _ = self.expected(name, seed, steps)
            apart.append(weight * (own[name] - center))
        return np.concatenate(apart)


def _means(values: np.ndarray, before: int, behind: int = 0) -> np.ndarray:
    """Return the mean of each value and of so many before and behind it; nan where none is known."""
    known = np.isfinite(values)
    near = np.ones(before + 1 + behind)
    sums = np.convolve(np.where(known, values, 0.0), near)
    counts = np.convolve(known, near)
    means = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0.5)
    return means[behind : behind + len(values)]  # type: ignore[no-any-return]
