"""The planner's fitted constants, in `constants.yaml` next to this file.

`python tools/fit_planner.py --refit` fits them again and writes that file.
"""

from __future__ import annotations

import functools
from pathlib import Path

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


class Median(Strict):
    """The median of the absolute relative errors on published rows."""

    rows: int
    median: float


class Error(Median):
    """Relative errors on published rows; 90th percentile and worst are of the absolute values."""

    percentile_90: float
    worst: float
    bias: float
    """median of predicted / published"""


class Fit(Strict):
    """The file."""

    constants: Constants
    errors: dict[str, Error]
    """of time and memory, of rows predicted by constants that never saw their document"""
    waiting: Median
    """of time, of rows outside `fitted_on` in which the GPU is predicted to wait for the host"""
    fitted_on: dict[str, list[int]]
    """rows of each document with a time, and with a memory"""
    left_out: dict[str, Constants]
    """fitted without the document"""


@functools.cache
def fitted() -> Fit:
    """Read the file."""
    return Fit.model_validate(yaml.safe_load(FILE.read_text()))


def time_error(waits: bool) -> Median:
    """Return the error of a predicted time; `waits`: the GPU waits for the host."""
    return fitted().waiting if waits else fitted().errors["time"]


@functools.cache
def fitted_constants() -> Constants:
    """Return the constants fitted on all documents."""
    return fitted().constants
