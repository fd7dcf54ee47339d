"""BERT samples: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without a sentence objective, with masked tokens.

A and B are runs of several sentences that fill the sample together (Devlin et al. 2018, section 3.1 and
appendix A.2). A chunk (see `data/samples/chunks.py`) is divided between two of its sentences, at random.
Then, for half of the samples,

    nsp: B is replaced by text of another document, label 1 (Devlin et al. 2018)
    sop: A and B are swapped, label 1 (ALBERT, arXiv 1909.11942, section 3.1)

A sample is a function of (seed, epoch, chunk) alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator
from transformers import PreTrainedTokenizerFast

from data.keyed_random import generator
from data.samples.chunks import Lengths, build_chunks
from data.samples.fields import HELD_OUT_SEED, Fields, HeldOut, StoredSamples, spread
from data.samples.masking import BertVocabulary, check_whole_words, mask
from data.tokens.store import Store
from recipes.families import BERT
from recipes.problems import Key, Problem, ProblemsError, Setting, counted
from recipes.schema import Masking, Recipe

HOLD_OUT_MORE = ("set ", Key("data.validation_every"), " or ", Key("data.test_every"), " lower")
_SPECIAL = {"none": 2, "nsp": 3, "sop": 3}  # [CLS] and one [SEP] per segment
_SENTENCE_LABELS = {
    "nsp": ("B follows A", "B is of another document"),
    "sop": ("A and B in order", "A and B swapped"),
}
SentenceHead = Literal["none", "nsp", "sop"]
Other = Callable[[int], "np.ndarray | None"]


@dataclass(frozen=True)
class BertSettings:
    """A recipe's settings of samples."""

    sequence_length: int  # S
    predictions: int  # P, most predictions of a sample
    sentence_head: SentenceHead
    masking: Masking
    seed: int

    @classmethod
    def of(cls, recipe: Recipe) -> BertSettings:
        head, masking = recipe.model.sentence_head, recipe.data.masking
        return cls(recipe.sequence_length, recipe.predictions, head, masking, recipe.seed)

    @property
    def room(self) -> int:
        """Tokens of text in a full sample."""
        return self.sequence_length - _SPECIAL[self.sentence_head]

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.room, self.masking.short_probability, self.seed)


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
        return self["labels"][self._real]

    def micro_batch(self, row_weights: np.ndarray) -> Mapping[str, np.ndarray]:
        weights = (self._real & (row_weights > 0)[:, None]).astype(np.float32)
        arrays = {**self, "weights": weights, "sentence_weights": row_weights.astype(np.float32)}
        return {name: arrays[name] for name in BERT.fields.names}

    def describe(self, row: int, tokenizer: PreTrainedTokenizerFast, sentence_head: str) -> str:
        """Show a sample's text with [was->now] in place of every predicted token."""
        sample = {key: values[row] for key, values in self.items()}
        length, predicted = int(sample["lengths"]), int(sample["predicted"])
        tokens, types = sample["tokens"][:length], sample["token_types"][:length]
        in_b, padding, most = int(types.sum()), len(sample["tokens"]) - length, len(sample["positions"])
        places = f"{counted(length, 'token')} ({length - in_b} in A, {in_b} in B), {padding} of padding"
        lines = [f"{places}; {predicted} predicted of at most {most}"]
        if sentence_head != "none":
            label = int(sample["sentence_labels"])
            lines.append(f"{sentence_head} label {label}: {_SENTENCE_LABELS[sentence_head][label]}")
        pieces = list(tokenizer.convert_ids_to_tokens(tokens.tolist()))
        for at, was in zip(sample["positions"][:predicted], sample["labels"][:predicted], strict=True):
            pieces[at] = f"[{tokenizer.convert_ids_to_tokens(int(was))}->{pieces[at]}]"
        for segment, name in enumerate("AB"):
            shown = [piece for piece, kind in zip(pieces, types, strict=True) if kind == segment]
            text = "".join(shown[:1])
            for before, piece in pairwise(shown):  # pieces of words are put together again
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
    rng: Generator, tokens: np.ndarray, borders: np.ndarray, head: SentenceHead, other: Other
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
        if (text := other(max(len(tokens) - end, 1))) is not None:
            return tokens[:end], text, 1
    cut = _cut(rng, len(tokens), borders)
    first, second = tokens[:cut], tokens[cut:]
    return (second, first, 1) if head == "sop" and changed and len(second) else (first, second, 0)


def _cut(rng: Generator, length: int, borders: np.ndarray) -> int:
    """Choose the end of A: a border of sentences, else inside the only sentence, or behind the only token."""
    if len(borders):
        return int(borders[rng.integers(len(borders))])
    return int(rng.integers(1, length)) if length > 1 else 1


def truncate(
    rng: Generator, first: np.ndarray, second: np.ndarray | None, room: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Drop tokens from the longer segment, from its front or its back at random, until both fit."""
    a, b = len(first), 0 if second is None else len(second)
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


def assemble(
    rng: Generator,
    first: np.ndarray,
    second: np.ndarray | None,
    label: int,
    vocabulary: BertVocabulary,
    settings: BertSettings,
) -> Sample:
    """Shorten segments A and B (None: only A) to fit a sample, add special tokens, and mask."""
    first, second = truncate(rng, first, second, settings.room)
    a, cls, sep = len(first), np.array([vocabulary.cls]), np.array([vocabulary.sep])
    texts = [cls, first, sep] if second is None else [cls, first, sep, second, sep]
    tokens = np.concatenate(texts, dtype=np.int64)
    special = [0, a + 1] if second is None else [0, a + 1, len(tokens) - 1]
    positions, labels = mask(rng, tokens, special, vocabulary, settings.masking, settings.predictions)
    return Sample(tokens, a + 2, positions, labels, label)


def stack(samples: Sequence[Sample], vocabulary: BertVocabulary, settings: BertSettings) -> BertFields:
    """Stack samples, padded to S tokens and P predictions."""
    count, length, most = len(samples), settings.sequence_length, settings.predictions
    fields = BertFields(
        tokens=np.full((count, length), vocabulary.pad, dtype=np.int64),
        token_types=np.zeros((count, length), dtype=np.int64),
        lengths=np.array([len(sample.tokens) for sample in samples], dtype=np.int64),
        positions=np.zeros((count, most), dtype=np.int64),
        labels=np.zeros((count, most), dtype=np.int64),
        predicted=np.array([len(sample.positions) for sample in samples], dtype=np.int64),
        sentence_labels=np.array([sample.sentence_label for sample in samples], dtype=np.int64),
    )
    for row, sample in enumerate(samples):
        fields["tokens"][row, : len(sample.tokens)] = sample.tokens
        fields["token_types"][row, sample.first_length : len(sample.tokens)] = 1
        fields["positions"][row, : len(sample.positions)] = sample.positions
        fields["labels"][row, : len(sample.labels)] = sample.labels
    return fields


class BertSamples(StoredSamples):
    """Samples of a store of sentences, one per chunk and epoch; safe for several threads."""

    def __init__(
        self, store: Store, documents: np.ndarray, settings: BertSettings, vocabulary: BertVocabulary
    ):
        """Cut the documents of one split into chunks.

        Args:
            documents: (D,) int64, ascending.

        Raises ValueError: there is no text; nsp has text of one document alone; whole words are to be masked,
        and the vocabulary does not tell where they begin.
        """
        check_whole_words(vocabulary, settings.masking)
        self._store, self._settings, self._vocabulary = store, settings, vocabulary
        self._chunks = build_chunks(store, documents, settings.lengths)
        self.documents = len(self._chunks.documents)
        if not self.documents:
            fix = ("give more, or ", *HOLD_OUT_MORE)
            none = f"{counted(len(documents), 'document')} {'has' if len(documents) == 1 else 'have'} no text"
            raise ProblemsError([Problem("data.name", none, fix=fix)])
        if self.documents < 2 and settings.sentence_head == "nsp":
            came = (Setting("model.sentence_head", "nsp"), " with text of one document alone")
            rule = "the second segment must come from another one"
            other = (", or set ", Key("model.sentence_head"), " to sop or none")
            better = ("give more documents, ", *HOLD_OUT_MORE, *other)
            raise ProblemsError([Problem("model.sentence_head", came, rule, better)])
        super().__init__(len(self._chunks), settings.sequence_length)

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        samples = [self._sample(seed, *self._orders.locate(int(position), seed)) for position in positions]
        return stack(samples, self._vocabulary, self._settings)

    def _sample(self, seed: int, epoch: int, chunk: int) -> Sample:
        rng = generator(seed, epoch, chunk)
        start, length = int(self._chunks.starts[chunk]), int(self._chunks.lengths[chunk])
        tokens = self._store.tokens_array[start : start + length]
        borders = np.array(self._borders(start, start + length), dtype=np.int64) - start
        other = partial(self._other, rng, chunk)
        parts = segments(rng, tokens, borders, self._settings.sentence_head, other)
        return assemble(rng, *parts, self._vocabulary, self._settings)

    def _borders(self, start: int, end: int) -> list[int]:
        """List the places of sentence beginnings strictly between `start` and `end` of the store."""
        size, pointers = self._store.dtype.itemsize, self._store.pointers
        # `bisect` looks at a few entries where they lie; numpy would copy the unaligned array first.
        first = bisect.bisect_right(pointers, start * size)
        last = bisect.bisect_left(pointers, end * size, lo=first, hi=min(len(pointers), first + end - start))
        return (pointers[first:last] // size).tolist()

    def _other(self, rng: Generator, chunk: int, wanted: int) -> np.ndarray:
        """Take sentences of another document from a random chunk on, until they have `wanted` tokens."""
        own_first, own_end = self._chunks.of_same_document(chunk)
        found = int(rng.integers(len(self._chunks) - (own_end - own_first)))
        found += (own_end - own_first) if found >= own_first else 0
        start, last = int(self._chunks.starts[found]), self._chunks.of_same_document(found)[1] - 1
        document_end = int(self._chunks.starts[last]) + int(self._chunks.lengths[last])
        # A document ends where a sentence does: the next border is not beyond it.
        size, pointers = self._store.dtype.itemsize, self._store.pointers
        border = bisect.bisect_left(pointers, min(start + wanted, document_end) * size)
        end = int(pointers[border]) // size if border < len(pointers) else self._store.tokens
        return self._store.tokens_array[start:end]


def fixed_samples(
    store: Store, documents: np.ndarray, settings: BertSettings, vocabulary: BertVocabulary, count: int
) -> HeldOut:
    """Make at most `count` evenly spread samples, without the recipe's seed. Raises as `BertSamples`."""
    samples = BertSamples(store, documents, replace(settings, seed=HELD_OUT_SEED), vocabulary)
    chosen = [samples._sample(HELD_OUT_SEED, 0, chunk) for chunk in spread(len(samples), count).tolist()]
    return HeldOut(stack(chosen, vocabulary, settings), settings.sequence_length)
