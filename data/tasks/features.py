"""Samples of a task for a model: token ids, token types, lengths and targets.

Shapes: n examples, C choices of each (1 but for multiple choice), S positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.fields import Fields, StoredSamples


class TaskFields(Fields):
    """tokens and token_types (n, S) or (n, C, S), lengths (n,) or (n, C), and targets (n,): int64."""

    @property
    def labels(self) -> np.ndarray:
        return self["labels" if "labels" in self else "starts"]

    @property
    def targets(self) -> dict[str, np.ndarray]:
        return {
            name: self[name] for name in ("labels", "starts", "ends") if name in self
        }

    def micro_batch(self, row_weights: np.ndarray) -> Mapping[str, np.ndarray]:
        length = self["tokens"].shape[-1]
        flat = {
            name: self[name].reshape(-1, length) for name in ("tokens", "token_types")
        }
        weights = row_weights.astype(np.float32)
        return {
            **flat,
            "lengths": self["lengths"].reshape(-1),
            **self.targets,
            "weights": weights,
        }

    def describe(
        self, row: int, tokenizer: PreTrainedTokenizerFast, sentence_head: str
    ) -> str:
        tokens = np.atleast_2d(self["tokens"][row])
        lengths = np.atleast_1d(self["lengths"][row])
        targets = ", ".join(
            f"{name} {values[row]}" for name, values in self.targets.items()
        )
        texts = (
            str(tokenizer.decode(ids[:length]))
            for ids, length in zip(tokens, lengths, strict=True)
        )
        return "\n".join([targets, *texts])


@dataclass(frozen=True)
class Encoded:
    """One text or pair of texts as tokens: [CLS] A [SEP], or [CLS] A [SEP] B [SEP]."""

    tokens: Sequence[int]
    token_types: Sequence[int]


class Features:
    """All samples of a split, without padding: a row is one text or pair, an example has C of them."""

    def __init__(
        self,
        rows: Sequence[Encoded],
        targets: Mapping[str, Sequence[int]],
        length: int,
        pad: int,
        choices: int = 1,
    ):
        self.sequence_length = length
        self.choices = choices
        self._pad = pad
        self._lengths = np.array([len(row.tokens) for row in rows], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int64)
        total = int(self._starts[-1])
        self._tokens = np.empty(total, np.int32)
        self._types = np.empty(total, np.int8)
        for row, start in zip(rows, self._starts, strict=False):
            self._tokens[start : start + len(row.tokens)] = row.tokens
            self._types[start : start + len(row.tokens)] = row.token_types
        self._targets = {
            name: np.asarray(values, np.int64) for name, values in targets.items()
        }

    def __len__(self) -> int:
        """Examples."""
        return len(self._lengths) // self.choices

    @property
    def total_tokens(self) -> int:
        return len(self._tokens)

    @property
    def checked(self) -> np.ndarray:
        """All tokens and targets, for a checksum."""
        return np.concatenate(
            [self._tokens, *(t.astype(np.int32) for t in self._targets.values())]
        )

    @property
    def labels(self) -> np.ndarray:
        """The labels of the examples (n,); of spans, their beginnings."""
        return self._targets["labels" if "labels" in self._targets else "starts"]

    def take(self, examples: Sequence[int] | np.ndarray) -> TaskFields:
        """Return the fields of some examples, padded to S."""
        chosen = np.asarray(examples, np.int64)
        rows = (chosen[:, None] * self.choices + np.arange(self.choices)).ravel()
        tokens = np.full((len(rows), self.sequence_length), self._pad, np.int64)
        types = np.zeros((len(rows), self.sequence_length), np.int64)
        for at, row in enumerate(rows):
            start = self._starts[row]
            length = self._lengths[row]
            tokens[at, :length] = self._tokens[start : start + length]
            types[at, :length] = self._types[start : start + length]
        shape = (len(chosen), self.choices) if self.choices > 1 else (len(chosen),)
        return TaskFields(
            {
                "tokens": tokens.reshape(*shape, -1),
                "token_types": types.reshape(*shape, -1),
                "lengths": self._lengths[rows].reshape(shape),
                **{name: values[chosen] for name, values in self._targets.items()},
            }
        )


class TaskSamples(StoredSamples):
    """Training examples; every epoch has its own order."""

    def __init__(self, features: Features):
        super().__init__(len(features))
        self._features = features

    def take(self, positions: Sequence[int], seed: int) -> TaskFields:
        return self._features.take(
            [self._orders.locate(position, seed)[1] for position in positions]
        )
