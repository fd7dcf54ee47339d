"""What the loader reads: samples as arrays, addressed by their position in training order.

Fields of n samples are arrays whose first dimension is n.
    GPT:  window (n, T + 1) int64: the first T tokens are the inputs, the last T the labels
    BERT: tokens, token_types (n, S) int64; lengths (n,) int64, tokens that are not padding, which stands at the end;
          positions, labels (n, P) int64; predicted (n,) int64, how many of the P are real, and the first ones;
          sentence_labels (n,) int64
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Fields = dict[str, np.ndarray]


class TrainingSamples(Protocol):
    """An endless sequence of samples."""

    sequence_length: int
    random_access: bool  # True: any positions at once, from any thread; False: one reader, that goes forward

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        """Fields of len(positions) samples; positions ascend. Reading forward is cheap."""
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


class HeldOut:
    """Samples in memory, always the same ones: those of a validation or of a test."""

    def __init__(self, fields: Fields, sequence_length: int):
        self.fields, self.sequence_length = fields, sequence_length
        assert len({len(values) for values in fields.values()}) == 1, "one row per sample in every field"

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    def __getitem__(self, index: int) -> Any:
        """A GPT's window (T + 1,), or the fields of one BERT sample."""
        row: dict[str, Any] = {key: values[index] for key, values in self.fields.items()}
        return row.get("window", row)

    def take(self, rows: Sequence[int] | np.ndarray) -> Fields:
        return {key: values[rows] for key, values in self.fields.items()}

    @property
    def labels(self) -> np.ndarray:
        """(N,) int64: every token that a loss over these samples predicts."""
        if "window" in self.fields:
            return self.fields["window"][:, 1:].ravel()
        labels = self.fields["labels"]
        return labels[np.arange(labels.shape[1]) < self.fields["predicted"][:, None]]


@dataclass(frozen=True)
class Parts:
    """The splits of a source as samples."""

    train: TrainingSamples
    validation: HeldOut
    test: HeldOut | None
    train_counts: np.ndarray  # (V,) occurrences in the training tokens, or in a part of them
    summary: dict[str, Any]


def concatenate(parts: Sequence[Fields]) -> Fields:
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def window_count(tokens: int, sequence_length: int) -> int:
    """Samples in a run of tokens: each uses `sequence_length` tokens, and the last one needs a label."""
    return max(0, tokens - 1) // sequence_length


def spread(available: int, wanted: int) -> np.ndarray:
    """min(available, wanted) indices, evenly spread over range(available), ascending."""
    count = min(available, wanted)
    return np.arange(count, dtype=np.int64) * available // max(count, 1)
