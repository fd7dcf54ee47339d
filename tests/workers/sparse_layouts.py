"""A proof's worker for a model with banded layers, under some layouts broken: sparse_layouts.py TASKS.json."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from broken_layouts import Breakage, train

from launch.experiments.parity.layout_cases import LayoutCase
from modeling import sparse_attention

CASES = (
    LayoutCase("tp2", 2, 1, 1, "zero0"),
    LayoutCase("pp2 recomputed", 1, 2, 1, "pipeline", accumulation=4, checkpointing="full"),
    LayoutCase("dp2 zero3", 1, 1, 2, "zero3"),
)
BROKEN = (
    LayoutCase("tp2, band one too wide", 2, 1, 1, "zero0"),
    LayoutCase("tp2, the first heads' columns", 2, 1, 1, "zero0"),
)


def one_too_wide() -> AbstractContextManager:
    right = sparse_attention.in_band
    return mock.patch.object(
        sparse_attention, "in_band", lambda query, key, window: right(query, key, window + 1)
    )


def columns_of_the_first_heads() -> AbstractContextManager:
    """Every tensor rank takes its heads for the first ones."""
    right = sparse_attention.in_fixed
    return mock.patch.object(
        sparse_attention,
        "in_fixed",
        lambda query, key, head, pattern: right(query, key, head, pattern._replace(first=0)),
    )


if __name__ == "__main__":
    train([*map(Breakage, BROKEN, (one_too_wide, columns_of_the_first_heads))])
