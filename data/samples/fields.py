"""Samples for the loader: arrays, addressed by their position in training order."""

from __future__ import annotations

import base64
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import numpy as np
from pydantic import PlainSerializer, PlainValidator
from transformers import PreTrainedTokenizerFast

from recipes.problems import Setting, Words, counted

# not the recipe's: runs that differ in it are measured on the same held-out samples
HELD_OUT_SEED = 0
_ORDERS = 2  # orders of epochs: a step can straddle two
F = TypeVar("F", bound="Fields")


def _array_to_json(array: np.ndarray) -> dict[str, Any]:
    text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": array.dtype.str, "shape": array.shape, "base64": text}


def _array_from_json(value: Any) -> np.ndarray:
    """Make an array of what `_array_to_json` returned. Raises ValueError."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, dict) or {*value} != {"dtype", "shape", "base64"}:
        raise ValueError("an array has dtype, shape and base64")
    numbers = np.frombuffer(
        base64.b64decode(value["base64"]), np.dtype(str(value["dtype"]))
    )
    return np.array(numbers.reshape(value["shape"]))


# An array of numbers that pydantic writes to JSON and reads again.
Array = Annotated[
    np.ndarray, PlainValidator(_array_from_json), PlainSerializer(_array_to_json)
]


class Fields(dict[str, np.ndarray]):
    """Samples of one family as named arrays of first dimension n, the number of samples."""

    @property
    def labels(self) -> np.ndarray:
        """All labels of these samples, (N,) int64."""
        raise NotImplementedError

    def micro_batch(self, row_weights: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return the arrays of a micro-batch, named as in `recipes.families`.

        Args:
            row_weights: (n,) weight of a sample, so that a mean over micro-batches and ranks is one over
                samples; 0: filling.
        """
        raise NotImplementedError

    def describe(
        self, row: int, tokenizer: PreTrainedTokenizerFast, sentence_head: str
    ) -> str:
        """Show one sample for a person to check: a line of facts, then its text."""
        raise NotImplementedError

    def rows(self: F, rows: Any) -> F:
        """Select samples by a slice or indices."""
        return type(self)({key: values[rows] for key, values in self.items()})

    @classmethod
    def concatenate(cls: type[F], parts: Sequence[F]) -> F:
        """Join the samples of all parts, one part after another."""
        joined = {}
        for key in parts[0]:
            joined[key] = np.concatenate([part[key] for part in parts])
        return cls(joined)


class TrainingSamples(Protocol):
    """An endless sequence of samples."""

    # True: any positions at once, from any thread; False: one reader, that goes forward
    random_access: bool

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        """Return the samples at ascending positions; reading forward is cheap."""

    def state(self, position: int) -> dict[str, Any]:
        """Return JSON values for `restore` to continue at `position` without reading up to it."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""

    def fresh(self) -> TrainingSamples:
        """Return an independent reader of the same samples, at their beginning."""


def shuffled(values: np.ndarray | int, seed: int, number: int) -> np.ndarray:
    """Shuffle the values, or the int64 numbers below `values`. Only (seed, number) decides the order."""
    return np.random.Generator(np.random.PCG64([seed, number])).permutation(values)


class EpochOrders:
    """Map from positions in training order to (epoch, sample); each epoch is a permutation of all samples.

    Safe for several threads. It keeps two orders in memory, of 8 bytes per sample each.
    """

    def __init__(self, samples: int):
        self._samples = samples
        self._lock = threading.Lock()
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def locate(self, position: int, seed: int) -> tuple[int, int]:
        """Return (epoch, index of the sample)."""
        epoch, within = divmod(position, self._samples)
        with self._lock:
            if (seed, epoch) not in self._orders:
                self._orders = dict([*self._orders.items()][1 - _ORDERS :])
                self._orders[seed, epoch] = shuffled(self._samples, seed, epoch)
            return epoch, int(self._orders[seed, epoch][within])


class StoredSamples(TrainingSamples):
    """Samples of a store, with random access from any thread. Every epoch has its own order."""

    random_access = True

    def __init__(self, samples: int):
        self._count = samples
        self._orders = EpochOrders(samples)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._count

    def state(self, position: int) -> dict[str, Any]:
        return {"position": position}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing: every position is reached at once."""

    def fresh(self) -> TrainingSamples:
        return self


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Fixed samples of a validation or a test, in memory."""

    fields: Fields

    def __len__(self) -> int:
        return len(next(iter(self.fields.values())))

    @property
    def labels(self) -> np.ndarray:
        """All labels of these samples, (N,) int64."""
        return self.fields.labels

    def take(self, rows: Sequence[int] | np.ndarray) -> Fields:
        return self.fields.rows(rows)


@dataclass(frozen=True)
class Parts:
    """The splits of a source as samples."""

    train: TrainingSamples
    validation: HeldOut
    test: HeldOut | None
    # (V,) occurrences in the training tokens, or in some of them
    train_counts: np.ndarray
    summary: dict[str, Any]


def window_count(tokens: int, sequence_length: int) -> int:
    """Count the samples of a run of tokens: `sequence_length` tokens each, plus a label for the last."""
    return max(0, tokens - 1) // sequence_length


def spread(available: int, wanted: int) -> np.ndarray:
    """Return min(available, wanted) indices, evenly spread over range(available), ascending."""
    count = min(available, wanted)
    return np.arange(count, dtype=np.int64) * available // max(count, 1)


def too_short(tokens: int, sequence_length: int) -> tuple[Words, ...]:
    """Say why so many tokens give no sample."""
    length = Setting("sequence_length", sequence_length)
    return (
        f"{counted(tokens, 'token')}, and one sample of ",
        length,
        f" needs {sequence_length + 1}",
    )
