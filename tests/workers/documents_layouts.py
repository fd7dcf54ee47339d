"""A proof's worker for a GPT with borders of documents, in some layouts broken: documents_layouts.py TASKS."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from broken_layouts import Breakage, train

from launch.experiments.parity.layout_cases import LayoutCase
from launch.ranks import processes
from modeling import documents

CASES = (
    LayoutCase("sequence tp2 zero2", 2, 1, 1, "zero2", sequence=True),
    LayoutCase("pp2 recomputed", 1, 2, 1, "pipeline", accumulation=4, checkpointing="full"),
    LayoutCase("dp2 zero3 selective", 1, 1, 2, "zero3", checkpointing="selective"),
)
PIPELINE = LayoutCase("borders lost in the second stage", 1, 2, 1, "pipeline")
SAMPLES = LayoutCase("borders of the wrong sample", 1, 1, 2, "zero1")
SHIFTED = LayoutCase("borders one token late", 2, 1, 1, "zero0")
POSITIONS = LayoutCase("positions not begun anew", 2, 1, 1, "zero1", sequence=True)


def lost_in_the_second_stage() -> AbstractContextManager:
    attend = documents._attend

    def without(within, layer, stream):
        return attend(within and processes.rank() == 0, layer, stream)

    return mock.patch.object(documents, "_attend", without)


def of_the_wrong_sample() -> AbstractContextManager:
    right = documents.row_of_documents
    return mock.patch.object(
        documents, "row_of_documents", lambda places, device: right(places.roll(1, 0), device)
    )


def one_token_late() -> AbstractContextManager:
    right = documents.row_of_documents

    def late(places, device):
        places = places.roll(1, 1)
        places[:, 0] = 0
        return right(places, device)

    return mock.patch.object(documents, "row_of_documents", late)


def not_begun_anew() -> AbstractContextManager:
    """The second tensor rank counts from the beginning of its own positions."""
    right = documents.own_positions

    def first(x, group):
        return x[:, : x.shape[1] // 2].contiguous() if x.ndim == 2 else right(x, group)

    return mock.patch.object(documents, "own_positions", first)


BROKEN = (
    Breakage(PIPELINE, lost_in_the_second_stage),
    Breakage(SAMPLES, of_the_wrong_sample),
    Breakage(SHIFTED, one_token_late),
    Breakage(POSITIONS, not_begun_anew),
)
if __name__ == "__main__":
    train(BROKEN)
