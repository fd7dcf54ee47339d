"""What the loader reads: samples as arrays, addressed by their position in training order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.keyed_random import EpochOrders

HELD_OUT_SEED = 0  # not the recipe's: runs that differ in it are measured on the same held-out samples
F = TypeVar("F", bound="Fields")


class Fields(dict[str, np.ndarray]):
    """Samples of one family as named arrays, whose first dimension is the number of samples n."""

    @property
    def labels(self) -> np.ndarray:
        """(N,) int64: every token that a loss over these samples predicts."""
        raise NotImplementedError

    def micro_batch(self, row_weights: np.ndarray) -> Mapping[str, np.ndarray]:
        """The arrays that `recipes.families` names.

        Args:
            row_weights: (n,) weight of a sample, so that a mean over micro-batches and ranks is one over
                samples; 0: filling.
        """
        raise NotImplementedError

    def describe(self, row: int, tokenizer: PreTrainedTokenizerFast, sentence_head: str) -> str:
        """One sample as text that a person can check: its facts in a line, then what it says."""
        raise NotImplementedError

    def rows(self: F, rows: Any) -> F:
        """Some of the samples, by a slice or indices."""
        return type(self)({key: values[rows] for key, values in self.items()})

    @classmethod
    def concatenate(cls: type[F], parts: Sequence[F]) -> F:
        """The samples of all parts, one part after another."""
        return cls({key: np.concatenate([part[key] for part in parts]) for key in parts[0]})


class TrainingSamples(Protocol):
    """An endless sequence of samples."""

    sequence_length: int
    random_access: bool  # True: any positions at once, from any thread; False: one reader, that goes forward

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        """Fields of len(positions) samples; positions ascend. Reading forward is cheap."""

    def state(self, position: int) -> dict[str, Any]:
        """JSON-able: what `restore` needs to read from `position` on without reading what lies before."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken."""

    def fresh(self) -> TrainingSamples:
        """The same samples read from the beginning, independent of this reader."""


class StoredSamples(TrainingSamples):
    """Samples of a store: any position is reached at once, from any thread. Every epoch has its own order."""

    random_access = True

    def __init__(self, samples: int, sequence_length: int):
        self.sequence_length, self._count, self._orders = sequence_length, samples, EpochOrders(samples)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._count

    def state(self, position: int) -> dict[str, Any]:
        return {"position": position}

    def restore(self, state: dict[str, Any]) -> None:
        """Nothing to do: every position is reached at once."""

    def fresh(self) -> TrainingSamples:
        return self


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Samples in memory, always the same ones: those of a validation or of a test."""

    fields: Fields
    sequence_length: int

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    @property
    def labels(self) -> np.ndarray:
        """(N,) int64: every token that a loss over these samples predicts."""
        return self.fields.labels

    def take(self, rows: Sequence[int] | np.ndarray) -> Fields:
        return self.fields.rows(rows)


@dataclass(frozen=True)
class Parts:
    """The splits of a source as samples."""

    train: TrainingSamples
    validation: HeldOut
    test: HeldOut | None
    train_counts: np.ndarray  # (V,) occurrences in the training tokens, or in a part of them
    summary: dict[str, Any]


def window_count(tokens: int, sequence_length: int) -> int:
    """Samples in a run of tokens: each uses `sequence_length` tokens, and the last one needs a label."""
    return max(0, tokens - 1) // sequence_length


def spread(available: int, wanted: int) -> np.ndarray:
    """min(available, wanted) indices, evenly spread over range(available), ascending."""
    count = min(available, wanted)
    return np.arange(count, dtype=np.int64) * available // max(count, 1)
