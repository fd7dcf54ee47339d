"""GPT samples: windows of a fixed length over the concatenated documents of one split.

Sample i is tokens [i * T, i * T + T + 1) of the split's stream: the first T are the inputs, the last T the
labels. So every token but the first of the stream is a label exactly once. Every document of the stream ends
with the end-of-document token; the reader puts it in where the store lacks it (stores of sentences, or
written without Megatron's --append-eod).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.fields import (
    Fields,
    HeldOut,
    StoredSamples,
    spread,
    too_short,
    window_count,
)
from data.text.documents import end_of_document
from data.tokens.store import Store
from recipes.families import PLACES
from recipes.problems import Key, ProblemsError, Words, counted
from recipes.schema import Origin, Recipe

if TYPE_CHECKING:
    from data.samples.lanes import Encode, Lane, LanePlace, LaneReader

_LOOKED_AT = 256  # documents to look at first for how the store ends documents


class GptFields(Fields):
    """Windows (n, T + 1) int64: the first T tokens are the inputs, the last T the labels."""

    @property
    def labels(self) -> np.ndarray:
        return self["window"][:, 1:].ravel()

    def micro_batch(self, row_weights: np.ndarray) -> Mapping[str, np.ndarray]:
        windows = self["window"]
        length = windows.shape[1] - 1
        weights = np.repeat(
            (row_weights / length).astype(np.float32)[:, None], length, axis=1
        )
        made = {"tokens": windows[:, :-1], "labels": windows[:, 1:], "weights": weights}
        if PLACES in self:
            made[PLACES] = self[PLACES]
        return made

    def describe(
        self, row: int, tokenizer: PreTrainedTokenizerFast, sentence_head: str
    ) -> str:
        window = self["window"][row]
        ends = int((window[:-1] == tokenizer.eos_token_id).sum())
        last = f"the label of the last one is {tokenizer.decode(window[-1:])!r}"
        facts = f"{len(window) - 1} input tokens, {ends} ends of documents among them; {last}"
        return f"{facts}\n{tokenizer.decode(window[:-1])}"


def fields_of_windows(windows: np.ndarray, border: int | None) -> GptFields:
    """Make the fields of windows (n, T + 1); `border`: the token that begins a document, or None."""
    if border is None:
        return GptFields(window=windows)
    from data.samples.documents import places_in_documents

    return GptFields(
        window=windows, places=places_in_documents(windows[:, :-1], border)
    )


class TokenStream:
    """The documents of a split as one run of tokens, read from the mapped store.

    It takes 17 bytes per piece. A piece is a run of neighbouring documents, or one document where
    end-of-document tokens are put in.
    """

    def __init__(self, store: Store, documents: np.ndarray, end_token: int):
        """Join the documents.

        Args:
            documents: (D,) int64, ascending; documents without tokens are left out.
        """
        self._tokens = store.tokens_array
        self._end_token = end_token
        starts = store.sequence_starts(store.document_index[documents])
        ends = store.sequence_starts(store.document_index[documents + 1])
        has_tokens = ends > starts
        starts = starts[has_tokens]
        ends = ends[has_tokens]
        self.documents = len(starts)
        without_end = _without_end(store, ends, end_token)
        # Neighbours in the store are one piece if nothing is put in between.
        breaks = (starts[1:] != ends[:-1]) | without_end[:-1]
        first = np.ones(len(starts), bool)
        last = np.ones(len(starts), bool)
        first[1:] = last[:-1] = breaks
        self._starts = starts[first]
        ends = ends[last]
        self._open = without_end[last]
        # (pieces,) places in the stream
        self._ends = np.cumsum(ends - self._starts + self._open)

    def __len__(self) -> int:
        """Number of tokens."""
        if len(self._ends):
            return int(self._ends[-1])
        return 0

    def read(self, start: int, end: int) -> np.ndarray:
        """Read the tokens from `start` to `end` of the stream, (end - start,) int64."""
        assert 0 <= start <= end <= len(self), "beyond the stream"
        tokens = np.empty(end - start, np.int64)
        piece = int(self._ends.searchsorted(start, side="right"))
        filled = 0
        while filled < len(tokens):
            piece_start = int(self._ends[piece - 1]) if piece else 0
            piece_end = int(self._ends[piece])
            place = start + filled
            put_in = int(self._open[piece])
            first = int(self._starts[piece]) + place - piece_start
            part = self._tokens[
                first : first + min(piece_end - put_in - place, len(tokens) - filled)
            ]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            if put_in and filled < len(tokens):
                tokens[filled] = self._end_token
                filled += 1
            piece += 1
        return tokens


def _without_end(store: Store, ends: np.ndarray, end_token: int) -> np.ndarray:
    """Return (D,) bool: the documents with these ends lack the end-of-document token.

    A store is written with such tokens or without. So where some documents agree, they decide for all, which
    spares reading a page of the disk per document.
    """
    some = store.tokens_array[ends[spread(len(ends), _LOOKED_AT)] - 1] != end_token
    if some.all() or not some.any():
        return np.full(len(ends), some.any())
    # numpy's comparison of arrays of any type is Any
    return store.tokens_array[ends - 1] != end_token  # type: ignore[no-any-return]


class GptSamples(StoredSamples):
    """Windows over a stream, in another order every epoch; safe for several threads."""

    def __init__(
        self, stream: TokenStream, sequence_length: int, border: int | None = None
    ):
        """Cut a stream into windows; `border` as for `fields_of_windows`.

        Raises ProblemsError: the stream is shorter than one window.
        """
        self.stream = stream
        self._border = border
        self._length = sequence_length
        count = window_count(len(stream), sequence_length)
        if not count:
            there = counted(stream.documents, "document")
            came = (f"{there} with ", *too_short(len(stream), sequence_length))
            fix = ("give more text, or set ", Key("sequence_length"), " lower")
            raise ProblemsError.of("sequence_length", came, fix=fix)
        super().__init__(count)

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        return self._windows(
            [self._orders.locate(int(position), seed)[1] for position in positions]
        )

    def fixed(self, count: int) -> HeldOut:
        """Return min(count, len) samples, evenly spread over the stream and in its order, without a seed."""
        return HeldOut(self._windows(spread(len(self), count).tolist()))

    def _windows(self, indices: Sequence[int]) -> Fields:
        length = self._length
        windows = np.empty((len(indices), length + 1), np.int64)
        for row, index in enumerate(indices):
            windows[row] = self.stream.read(index * length, index * length + length + 1)
        return fields_of_windows(windows, self._border)


@dataclass(frozen=True)
class GptFamily:
    """GPT's samples of documents; every family has these methods."""

    fields: ClassVar = GptFields
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int
    # the token that begins a document; None: the model sees no borders
    border: int | None = None

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> GptFamily:
        border = end_of_document(tokenizer) if recipe.data.borders else None
        return cls(tokenizer, recipe.sequence_length, border)

    def stored_samples(self, store: Store, documents: np.ndarray) -> GptSamples:
        """Make the samples of `documents` (D,) int64, ascending.

        Raises ProblemsError: they hold too little for one sample.
        """
        return GptSamples(
            TokenStream(store, documents, end_of_document(self.tokenizer)),
            self.sequence_length,
            self.border,
        )

    def never_predicted(self) -> list[int]:
        """List the tokens of stored documents that are never labels."""
        return []

    def encoder(self, origin: Origin, batch_characters: int) -> Encode:
        """Make the encoder of a stream's documents."""
        from data.text.encoder import Encoder

        return Encoder(self.tokenizer, batch_characters)

    def lane(self, reader: LaneReader) -> Lane:
        from data.samples.gpt_lane import GptLane

        return GptLane(reader, self.sequence_length)

    def stack(self, samples: Sequence[np.ndarray]) -> GptFields:
        """Stack the items of lanes into fields."""
        return fields_of_windows(np.stack(samples), self.border)

    def for_held_out(self) -> GptFamily:
        """Return the family without the recipe's seed."""
        return self

    def measure(self, number: int, place: LanePlace, encoded: np.ndarray) -> int:
        """Measure a document of lane `number`; `samples` takes the sum over documents."""
        return encoded.size

    def samples(self, measured: int) -> int:
        """Return the number of samples in documents of that measure."""
        return window_count(measured, self.sequence_length)

    def tokens(self, encoded: np.ndarray) -> np.ndarray:
        return encoded

    def too_short(self, measured: int) -> tuple[Words, ...]:
        """Say why documents of that measure give no sample."""
        return "have ", *too_short(measured, self.sequence_length)
