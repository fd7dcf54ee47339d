"""The planner's fitted constants, in `constants.yaml` next to this file.

`python launch/plan.py validate --refit` fits them again and writes that file.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, NonNegativeFloat, PositiveFloat

from recipes.schema import Strict

FILE = Path(__file__).with_name("constants.yaml")


class Constants(Strict):
    """Constants of the prediction; shares are of the catalogue's figures."""

    matrix: float = Field(gt=0, le=1.5)
    """of `matrix_share` x peak: what the products of training reach"""
    depth: NonNegativeFloat
    """K in k / (k + K), the share that a product over k keeps of that rate: filling and emptying its tiles"""
    traffic: PositiveFloat
    """of everything besides matrix products: bytes moved, relative to each operand read and written once"""
    link: float = Field(gt=0, le=1)
    """of the bandwidth inside a node: what collectives reach"""
    network: float = Field(gt=0, le=1)
    """of the bandwidth between nodes: what collectives reach"""
    kernel_us: NonNegativeFloat
    """microseconds of the host for each kernel that it starts"""
    fragmentation: NonNegativeFloat
    """of the allocated memory: what torch's allocator reserves besides. It takes memory in segments of 2 MiB
    (blocks up to 1 MiB), 20 MiB (up to 10 MiB) or a multiple of 2 MiB, and keeps those that are freed for
    blocks that fit (c10/cuda/CUDACachingAllocator.cpp)"""


@dataclass(frozen=True)
class Error:
    """Relative errors on published rows; median, 90th percentile and worst are of the absolute values.

    Attributes:
        bias: median of predicted / published.
    """

    rows: int
    median: float
    percentile_90: float
    worst: float
    bias: float


def published_error(quantity: Literal["time", "memory"]) -> Error:
    """Return the planner's error, by constants that never saw a row's document (`validate --refit`)."""
    return Error(**document()["errors"][quantity])


@functools.cache
def fitted_constants(measured: tuple[tuple[str, float], ...] = ()) -> Constants:
    """Return the fitted constants; `measured` replaces those measured on this machine, by name."""
    return Constants.model_validate({**document()["constants"], **dict(measured)})


@functools.cache
def document() -> dict[str, Any]:
    """Read the file: constants, rows of the fit, constants without each document."""
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def constants_without_each() -> dict[str, Constants]:
    """Return the constants fitted without each document."""
    fits = document().get("left_out") or {}
    return {name: Constants.model_validate(values) for name, values in fits.items()}


def clear_cache() -> None:
    """Forget the file, so that it is read again."""
    fitted_constants.cache_clear()
    document.cache_clear()
