"""BERT samples: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without a sentence objective, with masked tokens.

A and B are runs of several sentences that fill the sample together (Devlin et al. 2018, section 3.1 and
appendix A.2). A chunk (see `data/samples/chunks.py`) is divided between two of its sentences, at random.
Then, for half of the samples,

    nsp: B is replaced by text of another document, label 1 (Devlin et al. 2018)
    sop: A and B are swapped, label 1 (ALBERT, arXiv 1909.11942, section 3.1)

A sample is a function of only (seed, epoch, chunk).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.random import Generator
from transformers import PreTrainedTokenizerFast

from data.keyed_random import generator
from data.samples.chunks import Lengths, build_chunks, chunks_of_document
from data.samples.fields import HELD_OUT_SEED, Fields, HeldOut, StoredSamples, spread
from data.samples.lanes import (
    REMEMBERED,
    Encode,
    Lane,
    LanePlace,
    LaneReader,
    refuse_state,
)
from data.samples.masking import BertVocabulary, check_whole_words, mask
from data.text.encoder import SentenceEncoder
from data.tokens.store import Store
from recipes.families import BERT
from recipes.problems import Key, ProblemsError, Setting, counted
from recipes.schema import Masking, Origin, Recipe

_SENTENCE_LABELS = {
    "nsp": ("B follows A", "B is of another document"),
    "sop": ("A and B in order", "A and B swapped"),
}
SentenceHead = Literal["none", "nsp", "sop"]
Other = Callable[[int], "np.ndarray | None"]


class BertFields(Fields):
    """Samples padded at the end to S tokens and P predictions.

    tokens, token_types (n, S) int64; lengths (n,) int64, tokens without padding; positions, labels (n, P)
    int64; predicted (n,) int64, number of real predictions, the first of the P; sentence_labels (n,) int64.
    """

    @property
    def _real(self) -> np.ndarray:
        """Mask (n, P) bool of the real predictions."""
        return np.arange(self["labels"].shape[1]) < self["predicted"][:, None]

    @property
    def labels(self) -> np.ndarray:
        # numpy says Any of a choice by a mask
        return self["labels"][self._real]  # type: ignore[no-any-return]

    def micro_batch(self, row_weights: np.ndarray) -> Mapping[str, np.ndarray]:
        weights = (self._real & (row_weights > 0)[:, None]).astype(np.float32)
        arrays = {
            **self,
            "weights": weights,
            "sentence_weights": row_weights.astype(np.float32),
        }
        return {name: arrays[name] for name in BERT.fields.names}

    def describe(
        self, row: int, tokenizer: PreTrainedTokenizerFast, sentence_head: str
    ) -> str:
        """Show a sample's text with [was->now] in place of every predicted token."""
        sample = {key: values[row] for key, values in self.items()}
        length = int(sample["lengths"])
        predicted = int(sample["predicted"])
        tokens = sample["tokens"][:length]
        types = sample["token_types"][:length]
        in_b = int(types.sum())
        padding = len(sample["tokens"]) - length
        most = len(sample["positions"])
        lines = [
            f"{counted(length, 'token')} ({length - in_b} in A, {in_b} in B), {padding} of padding"
            f"; {predicted} predicted of at most {most}"
        ]
        if sentence_head != "none":
            label = int(sample["sentence_labels"])
            lines.append(
                f"{sentence_head} label {label}: {_SENTENCE_LABELS[sentence_head][label]}"
            )
        pieces = list(tokenizer.convert_ids_to_tokens(tokens.tolist()))
        for at, was in zip(
            sample["positions"][:predicted], sample["labels"][:predicted], strict=True
        ):
            pieces[at] = f"[{tokenizer.convert_ids_to_tokens(int(was))}->{pieces[at]}]"
        for segment, name in enumerate("AB"):
            shown = [
                piece
                for piece, kind in zip(pieces, types, strict=True)
                if kind == segment
            ]
            text = "".join(shown[:1])
            # pieces of words are put together again
            for before, piece in pairwise(shown):
                joined = piece.startswith("##") and not before.endswith("]")
                text += piece[2:] if joined else f" {piece}"
            lines += [f"{name}: {text}"] if shown else []
        return "\n".join(lines)


class Sample(NamedTuple):
    """One sample, without padding."""

    tokens: np.ndarray  # (L,) int64, masked
    first_length: int  # tokens of [CLS] A [SEP]
    positions: np.ndarray  # (K,) int64 places of predictions, ascending
    labels: np.ndarray  # (K,) int64 original tokens at these places
    sentence_label: int


def segments(
    rng: Generator,
    tokens: np.ndarray,
    borders: np.ndarray,
    head: SentenceHead,
    other: Other,
) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Divide a chunk into two segments: (A, B, sentence label); for `none` (A, None, 0).

    Args:
        tokens: (L,) of the chunk, L > 0.
        borders: (K,) places of sentence beginnings, between 0 and L.
        head: the sentence objective.
        other: nsp: gives about so many tokens of another document, or None where there is none yet.
    """
    if head == "none":
        return tokens, None, 0
    changed = rng.random() < 0.5
    if head == "nsp" and (changed or not len(borders)):
        # In a chunk of one sentence no sentence follows A: as in BERT, B is always of another document.
        end = _cut(rng, len(tokens), borders) if len(borders) else len(tokens)
        text = other(max(len(tokens) - end, 1))
        if text is not None:
            return tokens[:end], text, 1
    cut = _cut(rng, len(tokens), borders)
    first = tokens[:cut]
    second = tokens[cut:]
    if head == "sop" and changed and len(second):
        return second, first, 1
    return first, second, 0


def _cut(rng: Generator, length: int, borders: np.ndarray) -> int:
    """Choose the end of A: a border of sentences, else inside the only sentence, or behind the only token."""
    if len(borders):
        return int(borders[rng.integers(len(borders))])
    if length > 1:
        return int(rng.integers(1, length))
    return 1


def truncate(
    rng: Generator, first: np.ndarray, second: np.ndarray | None, room: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Drop tokens from the longer segment, from its front or its back at random, until both fit."""
    a = len(first)
    b = 0 if second is None else len(second)
    excess = a + b - room
    if excess <= 0:
        return first, second
    level = min(excess, abs(a - b))  # tokens to drop until both are equally long
    from_a = (level if a > b else 0) + (excess - level) // 2
    first = _shorten(rng, first, from_a)
    return first, None if second is None else _shorten(rng, second, excess - from_a)


def _shorten(rng: Generator, tokens: np.ndarray, dropped: int) -> np.ndarray:
    front = int(rng.binomial(dropped, 0.5)) if dropped else 0
    return tokens[front : len(tokens) - dropped + front]


@dataclass(frozen=True)
class BertFamily:
    """BERT's samples of documents: segments of their sentences. `GptFamily` says what the methods do."""

    fields: ClassVar = BertFields
    tokenizer: PreTrainedTokenizerFast
    vocabulary: BertVocabulary
    sequence_length: int  # S
    predictions: int  # P, most predictions of a sample
    sentence_head: SentenceHead
    masking: Masking
    seed: int

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> BertFamily:
        """Take the recipe's settings and the vocabulary's tokens.

        Raises ProblemsError: whole words are to be masked, and the vocabulary does not tell where they begin.
        """
        vocabulary = BertVocabulary.of(tokenizer)
        masking = recipe.data.masking
        check_whole_words(vocabulary, masking)
        return cls(
            tokenizer,
            vocabulary,
            recipe.sequence_length,
            recipe.predictions,
            recipe.model.sentence_head,
            masking,
            recipe.seed,
        )

    @property
    def room(self) -> int:
        """Tokens of text in a full sample, without [CLS] and one [SEP] per segment."""
        return self.sequence_length - (2 if self.sentence_head == "none" else 3)

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.room, self.masking.short_probability, self.seed)

    def stored_samples(self, store: Store, documents: np.ndarray) -> BertSamples:
        return BertSamples(store, documents, self)

    def never_predicted(self) -> list[int]:
        return self.tokenizer.all_special_ids

    def encoder(self, origin: Origin, batch_characters: int) -> Encode:
        return SentenceEncoder(self.tokenizer, origin.sentences, batch_characters)

    def lane(self, reader: LaneReader) -> Lane:
        return BertLane(reader, self)

    def for_held_out(self) -> BertFamily:
        return replace(self, seed=HELD_OUT_SEED)

    def measure(self, number: int, place: LanePlace, encoded: list[np.ndarray]) -> int:
        return (
            len(text_of(number, place, encoded, self.lengths).starts) if encoded else 0
        )

    def samples(self, measured: int) -> int:
        return measured

    def tokens(self, encoded: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.uint32), *encoded])

    def too_short(self, measured: int) -> tuple[str, ...]:
        return ("have no text",)

    def assemble(
        self, rng: Generator, first: np.ndarray, second: np.ndarray | None, label: int
    ) -> Sample:
        """Shorten segments A and B (None: only A) to fit a sample, add special tokens, and mask."""
        first, second = truncate(rng, first, second, self.room)
        a = len(first)
        cls = np.array([self.vocabulary.cls])
        sep = np.array([self.vocabulary.sep])
        texts = [cls, first, sep]
        special = [0, a + 1]
        if second is not None:
            texts += [second, sep]
            special.append(a + 2 + len(second))
        tokens = np.concatenate(texts, dtype=np.int64)
        positions, labels = mask(
            rng, tokens, special, self.vocabulary, self.masking, self.predictions
        )
        return Sample(tokens, a + 2, positions, labels, label)

    def stack(self, samples: Sequence[Sample]) -> BertFields:
        """Stack samples, padded to S tokens and P predictions."""
        count = len(samples)
        length = self.sequence_length
        most = self.predictions
        fields = BertFields(
            tokens=np.full((count, length), self.vocabulary.pad, np.int64),
            token_types=np.zeros((count, length), np.int64),
            lengths=np.zeros(count, np.int64),
            positions=np.zeros((count, most), np.int64),
            labels=np.zeros((count, most), np.int64),
            predicted=np.zeros(count, np.int64),
            sentence_labels=np.zeros(count, np.int64),
        )
        for row, sample in enumerate(samples):
            tokens = len(sample.tokens)
            predicted = len(sample.positions)
            fields["tokens"][row, :tokens] = sample.tokens
            fields["token_types"][row, sample.first_length : tokens] = 1
            fields["lengths"][row] = tokens
            fields["positions"][row, :predicted] = sample.positions
            fields["labels"][row, :predicted] = sample.labels
            fields["predicted"][row] = predicted
            fields["sentence_labels"][row] = sample.sentence_label
        return fields


class BertSamples(StoredSamples):
    """Samples of a store of sentences, one per chunk and epoch; safe for several threads."""

    def __init__(self, store: Store, documents: np.ndarray, family: BertFamily):
        """Cut the documents of one split into chunks.

        Args:
            documents: (D,) int64, ascending.

        Raises ProblemsError: there is no text, or nsp has text of only one document.
        """
        self._store = store
        self._family = family
        self._chunks = build_chunks(store, documents, family.lengths)
        filled = len(self._chunks.documents)
        hold_out_more = (
            "set ",
            Key("data.validation_every"),
            " or ",
            Key("data.test_every"),
            " lower",
        )
        if not filled:
            raise ProblemsError.of(
                "data.name",
                f"no text in {counted(len(documents), 'document')}",
                fix=("give more, or ", *hold_out_more),
            )
        if filled < 2 and family.sentence_head == "nsp":
            came = (
                Setting("model.sentence_head", "nsp"),
                " with text of one document alone",
            )
            rule = "the second segment must come from another one"
            other = (", or set ", Key("model.sentence_head"), " to sop or none")
            better = ("give more documents, ", *hold_out_more, *other)
            raise ProblemsError.of("model.sentence_head", came, rule, better)
        super().__init__(len(self._chunks))

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        places = (self._orders.locate(int(position), seed) for position in positions)
        return self._family.stack([self._sample(seed, *place) for place in places])

    def fixed(self, count: int) -> HeldOut:
        """Make at most `count` evenly spread samples of epoch 0."""
        seed = self._family.seed
        chosen = [
            self._sample(seed, 0, chunk) for chunk in spread(len(self), count).tolist()
        ]
        return HeldOut(self._family.stack(chosen))

    def _sample(self, seed: int, epoch: int, chunk: int) -> Sample:
        rng = generator(seed, epoch, chunk)
        start = int(self._chunks.starts[chunk])
        length = int(self._chunks.lengths[chunk])
        tokens = self._store.tokens_array[start : start + length]
        borders = np.array(self._borders(start, start + length), np.int64) - start
        other = partial(self._other, rng, chunk)
        return self._family.assemble(
            rng, *segments(rng, tokens, borders, self._family.sentence_head, other)
        )

    def _borders(self, start: int, end: int) -> list[int]:
        """List the places of sentence beginnings strictly between `start` and `end` of the store."""
        size = self._store.dtype.itemsize
        pointers = self._store.pointers
        # `bisect` looks at a few entries where they lie; numpy would copy the unaligned array first.
        first = bisect.bisect_right(pointers, start * size)
        last = bisect.bisect_left(
            pointers, end * size, lo=first, hi=min(len(pointers), first + end - start)
        )
        return [*map(int, pointers[first:last] // size)]

    def _other(self, rng: Generator, chunk: int, wanted: int) -> np.ndarray:
        """Take sentences of another document from a random chunk on, until they have `wanted` tokens."""
        own_first, own_end = self._chunks.of_same_document(chunk)
        other = int(rng.integers(len(self._chunks) - (own_end - own_first)))
        other += (own_end - own_first) if other >= own_first else 0
        start = int(self._chunks.starts[other])
        last = self._chunks.of_same_document(other)[1] - 1
        document_end = int(self._chunks.starts[last]) + int(self._chunks.lengths[last])
        # A document ends where a sentence does: the next border is not beyond it.
        size = self._store.dtype.itemsize
        pointers = self._store.pointers
        border = bisect.bisect_left(pointers, min(start + wanted, document_end) * size)
        end = (
            int(pointers[border]) // size
            if border < len(pointers)
            else self._store.tokens
        )
        return self._store.tokens_array[start:end]


@dataclass(frozen=True)
class Tokenized:
    """A document as one run of tokens."""

    place: LanePlace
    tokens: np.ndarray  # (L,)
    edges: np.ndarray  # (S + 1,) where sentences begin, and L
    starts: np.ndarray  # (C,) where chunks begin
    lengths: np.ndarray  # (C,)


def text_of(
    number: int, place: LanePlace, sentences: list[np.ndarray], lengths: Lengths
) -> Tokenized:
    """Join the sentences of a document and cut it into chunks.

    Args:
        number: of the lane; with the place it decides the random lengths of chunks.
    """
    edges = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
    # Without the epoch: as in a store, a document is always cut into the same chunks.
    document = (number << 48) ^ (place.turn << 32) ^ place.record
    return Tokenized(
        place,
        np.concatenate(sentences),
        edges,
        *chunks_of_document(edges, document, lengths),
    )


class BertLane(Lane):
    """One sample per chunk: a function of (seed, lane, item) and of the last REMEMBERED documents.

    The state names the first of these documents. A resumed run reads from there, so that it remembers the
    same ones.
    """

    def __init__(self, reader: LaneReader, family: BertFamily):
        self._family = family
        self._lengths = family.lengths
        self._remembered: deque[Tokenized] = deque(maxlen=REMEMBERED)
        self._current: Tokenized | None = None
        self._chunk = 0  # the next one of the current document
        super().__init__(reader)

    def take(self, item: int, seed: int) -> Sample:
        text, chunk = self._next_chunk()
        start = int(text.starts[chunk])
        length = int(text.lengths[chunk])
        inside = (
            text.edges[(text.edges > start) & (text.edges < start + length)] - start
        )
        rng = generator(seed, self.reader.lane, item)
        tokens = text.tokens[start : start + length]
        other = partial(self._other, rng, text)
        return self._family.assemble(
            rng, *segments(rng, tokens, inside, self._family.sentence_head, other)
        )

    def skip(self) -> None:
        self._next_chunk()

    def _next_chunk(self) -> tuple[Tokenized, int]:
        while not self._current or self._chunk == len(self._current.starts):
            following = self._read()
            if self._current:
                self._remembered.append(self._current)
            self._current = following
            self._chunk = 0
        self._chunk += 1
        return self._current, self._chunk - 1

    def _read(self) -> Tokenized:
        while True:
            for document, sentences in self._encoded:
                if sentences:
                    self._fruitful = True
                    return text_of(
                        self.reader.lane, document.place, sentences, self._lengths
                    )
            self._open_next_epoch("have no text")

    def _other(
        self, rng: Generator, current: Tokenized, wanted: int
    ) -> np.ndarray | None:
        """Take sentences of a remembered document, of a wanted number of tokens."""
        # Of another turn or record: the same document comes again in every epoch.
        others = [
            text for text in self._remembered if text.place[1:3] != current.place[1:3]
        ]
        if not others:
            return None
        chosen = others[rng.integers(len(others))]
        first = int(rng.integers(len(chosen.edges) - 1))
        start = chosen.edges[first]
        last = min(
            int(np.searchsorted(chosen.edges, start + wanted)), len(chosen.edges) - 1
        )
        return chosen.tokens[start : chosen.edges[last]]

    def state(self) -> dict[str, Any]:
        first = self._remembered[0] if self._remembered else self._current
        place = first.place if first else self._place
        chunk = self._chunk if self._current else None
        return {**place.state(), "remembered": len(self._remembered), "chunk": chunk}

    def restore(self, state: dict[str, Any]) -> None:
        self._resume(state)
        self._remembered.clear()
        self._remembered.extend(self._read() for _ in range(state["remembered"]))
        self._current = None
        self._chunk = 0
        if state["chunk"] is not None:
            self._current = self._read()
            self._chunk = state["chunk"]
            chunks = len(self._current.starts)
            if self._chunk > chunks:
                refuse_state(
                    self.reader.source,
                    state,
                    f"the document there has {counted(chunks, 'chunk')}",
                )
