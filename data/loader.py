"""Micro-batches for one data-parallel rank. The batch of a step does not depend on the layout.

Sample j of step s is sample s * global + j of the training order. It belongs to micro-batch a, data-parallel rank r and
row m with j = (a * dp + r) * micro + m. No worker processes: a micro-batch is a few slices of a mapped file.

The loss of a micro-batch is sum(cross_entropy * weights). Weights make its mean over micro-batches and ranks, which
DeepSpeed computes, the mean over all tokens of the global batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from data.samples import Samples, TrainingSamples

MicroBatch = dict[str, torch.Tensor]
"""tokens (B, T) int64, labels (B, T) int64, weights (B, T) float32"""


class BatchLayout(Protocol):
    """micro x accumulation x dp = global_batch, in samples."""

    @property
    def micro(self) -> int: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def global_batch(self) -> int: ...


def rank_rows(layout: BatchLayout, dp_rank: int) -> np.ndarray:
    """(accumulation, micro) int64: which samples of the global batch this rank reads, by micro-batch and row."""
    _check(layout, dp_rank)
    rows = np.arange(layout.global_batch).reshape(layout.accumulation, layout.dp, layout.micro)
    return rows[:, dp_rank]


def micro_batch(windows: np.ndarray, row_weights: np.ndarray) -> MicroBatch:
    """
    Args:
        windows: (B, T + 1) int64.
        row_weights: (B,) weight of every token of a row.
    """
    tensor = torch.from_numpy(windows)
    weights = torch.from_numpy(row_weights.astype(np.float32))
    return {
        "tokens": tensor[:, :-1].contiguous(),
        "labels": tensor[:, 1:].contiguous(),
        "weights": weights[:, None].repeat(1, windows.shape[1] - 1),
    }


class StepBatches:
    """Endless iterator: each `next` is the list of `accumulation` micro-batches of the next optimizer step."""

    def __init__(
        self,
        samples: TrainingSamples,
        seed: int,
        layout: BatchLayout,
        dp_rank: int,
        start_step: int = 0,
        start_state: dict[str, Any] | None = None,
    ):
        """
        Args:
            start_step: optimizer steps that are already done; batches continue after them.
            start_state: what `state` returned then. Only speed depends on it, and only for streamed sources, which
                otherwise tokenize again what they already went through.
        """
        self._samples, self._seed, self._layout = samples, seed, layout
        self._rows = rank_rows(layout, dp_rank)
        self.step = start_step
        if start_state is not None:
            if start_state.get("position") != start_step * layout.global_batch:
                raise ValueError(
                    f"data position {start_state.get('position')} is not that of step {start_step} with batch.global="
                    f"{layout.global_batch}: resume with the batch.global of the checkpoint"
                )
            samples.restore(start_state)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        positions = self.step * self._layout.global_batch + self._rows
        windows = self._samples.take(positions.ravel().tolist(), self._seed)
        windows = windows.reshape(*positions.shape, -1)  # (accumulation, micro, T + 1)
        weights = np.full(self._layout.micro, 1.0 / (self._layout.micro * self._samples.sequence_length))
        self.step += 1
        return [micro_batch(part, weights) for part in windows]

    def state(self) -> dict[str, Any]:
        """JSON-able position in the data, equal on all ranks and for all layouts of one global batch."""
        return self._samples.state(self.step * self._layout.global_batch)

    def digest(self, step: int) -> str:
        """SHA-256 of the tokens of a step's global batch, in order. Reads all of it: for checks, not for every step."""
        first = step * self._layout.global_batch
        windows = self._samples.fresh().take(range(first, first + self._layout.global_batch), self._seed)
        return hashlib.sha256(windows.astype("<i8").tobytes()).hexdigest()


def validation_batches(samples: Samples, micro: int, accumulation: int, dp: int, dp_rank: int) -> list[list[MicroBatch]]:
    """All validation steps of one rank, each a list of `accumulation` micro-batches.

    Every rank gets the same number: the last step is filled up with copies of weight 0. The mean of the loss over all
    micro-batches of all steps and ranks is the mean over the tokens of the real samples.
    """
    assert len(samples) > 0, "build() refuses corpora without validation samples"
    layout = _Layout(micro, accumulation, dp)
    rows = rank_rows(layout, dp_rank)
    steps = -(-len(samples) // layout.global_batch)
    real_weight = steps * accumulation * dp / (len(samples) * samples.sequence_length)
    batches = []
    for step in range(steps):
        positions = step * layout.global_batch + rows  # (accumulation, micro)
        batches.append(
            [
                micro_batch(
                    np.stack([samples[min(position, len(samples) - 1)] for position in part.tolist()]),
                    np.where(part < len(samples), real_weight, 0.0),
                )
                for part in positions
            ]
        )
    return batches


class _Layout:
    def __init__(self, micro: int, accumulation: int, dp: int):
        self.micro, self.accumulation, self.dp = micro, accumulation, dp
        self.global_batch = micro * accumulation * dp


def _check(layout: BatchLayout, dp_rank: int) -> None:
    product = layout.micro * layout.accumulation * layout.dp
    if product != layout.global_batch:
        raise ValueError(
            f"micro {layout.micro} x accumulation {layout.accumulation} x dp {layout.dp} = {product}, but the global "
            f"batch is {layout.global_batch}: the product must be the global batch"
        )
    if not 0 <= dp_rank < layout.dp:
        raise ValueError(f"data-parallel rank {dp_rank} is not in 0..{layout.dp - 1}")
