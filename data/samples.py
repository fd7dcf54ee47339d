"""GPT samples: windows of a fixed length over concatenated documents.

Sample i of a part is tokens[i*T : i*T + T + 1]: the first T are the inputs, the last T the labels, so that every token
but the first of the part is a label exactly once. Everything is a function of (seed, position).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class TrainingSamples(Protocol):
    """What the loader reads: an endless sequence of samples, addressed by position in training order."""

    sequence_length: int

    def take(self, positions: Iterable[int], seed: int) -> np.ndarray:
        """(len(positions), T + 1) int64; positions ascend. Reading forward is cheap."""
        ...

    def state(self, position: int) -> dict[str, Any]:
        """JSON-able: what `restore` needs to read from `position` on without reading what lies before."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken."""
        ...

    def fresh(self) -> TrainingSamples:
        """The same samples read from the beginning, independent of this reader."""
        ...


def window_count(tokens: int, sequence_length: int) -> int:
    """Samples in a run of tokens: each uses `sequence_length` tokens, and the last one needs a label."""
    return max(0, tokens - 1) // sequence_length


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """(samples,) int64: the order of an epoch, a permutation that (seed, epoch) decides alone."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)


@dataclass(frozen=True)
class Parts:
    """A source's two parts as samples."""

    train: TrainingSamples
    validation: Samples
    train_counts: np.ndarray  # (V,) occurrences in the training tokens, or in the first of them
    summary: dict[str, Any]


class Samples:
    """Windows over a token array in memory or on disk; `windows` selects and orders them."""

    def __init__(self, tokens: np.ndarray, sequence_length: int, windows: np.ndarray | None = None):
        """
        Args:
            tokens: (N,) of any unsigned type, read where it lies.
            sequence_length: T.
            windows: indices of the windows that are used; all of them if None.
        """
        self.sequence_length = sequence_length
        self._tokens = tokens
        available = window_count(len(tokens), sequence_length)
        self._windows = np.arange(available) if windows is None else windows
        assert self._windows.size == 0 or self._windows.max() < available, "window beyond the tokens"
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> np.ndarray:
        """(T + 1,) int64."""
        start = int(self._windows[index]) * self.sequence_length
        return self._tokens[start : start + self.sequence_length + 1].astype(np.int64)

    def take(self, positions: Iterable[int], seed: int) -> np.ndarray:
        return np.stack([self[self._index(position, seed)] for position in positions])

    def state(self, position: int) -> dict[str, Any]:
        return {"position": position}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to do: every position is reached at once."""

    def fresh(self) -> Samples:
        return self

    def _index(self, position: int, seed: int) -> int:
        epoch, within = divmod(position, len(self))
        if (seed, epoch) not in self._orders:
            # A step can straddle two epochs; older orders are let go.
            self._orders = {key: order for key, order in self._orders.items() if key == (seed, epoch - 1)}
            self._orders[seed, epoch] = epoch_order(len(self), seed, epoch)
        return int(self._orders[seed, epoch][within])


def spread(available: int, wanted: int) -> np.ndarray:
    """min(available, wanted) indices, evenly spread over range(available), ascending."""
    count = min(available, wanted)
    return np.arange(count, dtype=np.int64) * available // max(count, 1)
