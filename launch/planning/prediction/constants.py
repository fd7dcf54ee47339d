"""The planner's fitted constants, in `constants.yaml` next to this file.

`python tools/fit_planner.py --refit` fits them again and writes that file.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, NonNegativeFloat, PositiveFloat

from recipes.schema import Strict

FILE = Path(__file__).with_name("constants.yaml")
Quantity = Literal["time", "memory"]


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
    documents: int
    """that the rows are of"""


class Fit(Strict):
    """The file."""

    constants: Constants
    errors: dict[str, Error]
    """of each `kind` of rows, predicted by constants that never saw their document"""
    waiting: Median
    """of time, of rows outside `fitted_on` in which the GPU is predicted to wait for the host"""
    software: list[str]
    """with a time in several documents: its rows are predicted by constants that saw others of it"""
    fitted_on: dict[str, list[int]]
    """rows of each document with a time, and with a memory"""
    left_out: dict[str, Constants]
    """fitted without the document"""

    def kind(self, quantity: Quantity, precision: str, software: str = "") -> str:
        """Return the key of the error that such a prediction bears."""
        if precision == "fp32":
            return f"fp32 {quantity}"
        known = quantity == "memory" or software in self.software
        return quantity if known else "unseen"


@functools.cache
def fitted() -> Fit:
    """Read the file."""
    return Fit.model_validate(yaml.safe_load(FILE.read_text()))


@functools.cache
def fitted_constants() -> Constants:
    """Return the constants fitted on all documents."""
    return fitted().constants
