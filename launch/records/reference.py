"""The judgement of a run by runs of the same recipe with other seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from launch.records.facts import Finite, Judgement

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


@dataclass(frozen=True)
class Reference:
    """Runs of one recipe by seed, and the beginnings of runs with a mistake each, by its name."""

    runs: Mapping[int, Series]
    misuses: Mapping[str, Series]

    def judge(self, run: Series, seed: int) -> Judgement:
        """Judge a run with validations, of `seed`, no longer than these."""
        step = max(run.validation)
        band = [np.interp(step, *self._points(each)) for each in self.runs.values()]
        spread = (max(band) - min(band)) / 2
        difference = run.validation[step] - float(np.median(band))
        if abs(difference) <= 2 * spread:
            return Judgement(step, difference, float(spread))
        causes = (*self.misuses,)[:3]
        how = (step, "validation loss", difference, causes)
        return Judgement(step, difference, float(spread), *how)

    def _points(self, run: Series) -> tuple[list[int], list[float]]:
        return list(run.validation), list(run.validation.values())
