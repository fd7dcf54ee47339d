"""What a BERT makes of a store's or a stream's documents: the same chunks of sentences."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.keyed_random import generator
from data.samples.bert import (
    BertFields,
    BertSamples,
    BertSettings,
    Sample,
    assemble,
    fixed_samples,
    segments,
    stack,
)
from data.samples.chunks import chunks_of_document
from data.samples.fields import HELD_OUT_SEED, HeldOut
from data.samples.masking import BertVocabulary, check_whole_words
from data.samples.streams.lanes import Encode, Lane, Place, Reader
from data.text.vocabularies.encoder import SentenceEncoder
from data.tokens.indexed import Store
from recipes.problems import Text
from recipes.schema import Origin, Recipe

REMEMBERED = 16  # documents of a lane that the random segments of NSP are taken from


@dataclass(frozen=True)
class BertFamily:
    tokenizer: PreTrainedTokenizerFast
    vocabulary: BertVocabulary
    settings: BertSettings

    sequences: ClassVar[Literal["sentences"]] = "sentences"

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> BertFamily:
        """The recipe's settings with the vocabulary's tokens.

        Raises:
            ProblemsError: whole words are to be masked, and the vocabulary does not tell where words begin.
        """
        vocabulary, settings = BertVocabulary.of(tokenizer), BertSettings.of(recipe)
        check_whole_words(vocabulary, settings.masking)
        return cls(tokenizer, vocabulary, settings)

    def training_samples(self, store: Store, documents: np.ndarray) -> BertSamples:
        return BertSamples(store, documents, self.settings, self.vocabulary)

    def held_out(self, store: Store, documents: np.ndarray, wanted: int) -> HeldOut:
        return fixed_samples(store, documents, self.settings, self.vocabulary, wanted)

    def never_predicted(self) -> list[int]:
        return self.tokenizer.all_special_ids

    def encoder(self, origin: Origin, batch_characters: int) -> Encode:
        return SentenceEncoder(self.tokenizer, origin.sentences, batch_characters)

    def lane(self, reader: Reader, number: int) -> Lane:
        return BertLane(reader, number, self.settings, self.vocabulary)

    def stack(self, samples: Sequence[Sample]) -> BertFields:
        return stack(samples, self.vocabulary, self.settings)

    def for_held_out(self) -> BertFamily:
        return replace(self, settings=replace(self.settings, seed=HELD_OUT_SEED))

    def measure(self, number: int, place: Place, encoded: list[np.ndarray]) -> int:
        return len(text_of(number, place, encoded, self.settings).starts) if encoded else 0

    def samples(self, measured: int) -> int:
        return measured

    def tokens(self, encoded: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.uint32), *encoded])

    def too_short(self, measured: int) -> Text:
        return "have no text"


@dataclass(frozen=True)
class Tokenized:
    """A document as one run of tokens."""

    place: Place
    tokens: np.ndarray  # (L,)
    edges: np.ndarray  # (S + 1,) where sentences begin, and L
    starts: np.ndarray  # (C,) where chunks begin
    lengths: np.ndarray  # (C,)


def text_of(number: int, place: Place, sentences: list[np.ndarray], settings: BertSettings) -> Tokenized:
    """The document that these sentences are.

    Args:
        number: of the lane; with the place it decides the random lengths of chunks.
    """
    sizes = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    # Without the epoch: as in a store, a document is always cut into the same chunks.
    document = (number << 48) ^ (place.turn << 32) ^ place.record
    chunks = chunks_of_document(sizes, document, settings.lengths)
    return Tokenized(place, np.concatenate(sentences), np.concatenate([[0], np.cumsum(sizes)]), *chunks)


class BertLane(Lane):
    """One sample per chunk. An item is a function of (seed, lane, item) and of the last REMEMBERED documents.

    The state names the first document that is remembered: a resumed run reads from there, so that it
    remembers the same ones.
    """

    def __init__(self, reader: Reader, number: int, settings: BertSettings, vocabulary: BertVocabulary):
        self._number, self._settings, self._vocabulary = number, settings, vocabulary
        self._remembered: deque[Tokenized] = deque(maxlen=REMEMBERED)
        self._current: Tokenized | None = None
        self._chunk = 0  # of the current document, that comes next
        super().__init__(reader)

    def take(self, item: int, seed: int) -> Sample:
        text, chunk = self._next_chunk()
        start, length = int(text.starts[chunk]), int(text.lengths[chunk])
        inside = text.edges[(text.edges > start) & (text.edges < start + length)] - start
        rng, head = generator(seed, self._number, item), self._settings.sentence_head
        found = segments(rng, text.tokens[start : start + length], inside, head, self._other(rng, text))
        return assemble(rng, *found, self._vocabulary, self._settings)

    def skip(self) -> None:
        self._next_chunk()

    def _next_chunk(self) -> tuple[Tokenized, int]:
        while self._current is None or self._chunk == len(self._current.starts):
            following = self._read()
            if self._current is not None:
                self._remembered.append(self._current)
            self._current, self._chunk = following, 0
        self._chunk += 1
        return self._current, self._chunk - 1

    def _read(self) -> Tokenized:
        while True:
            for document, sentences in self._encoded:
                if sentences:
                    self._fruitful = True
                    return text_of(self._number, document.place, sentences, self._settings)
            self._open_next_epoch()

    def _other(self, rng: np.random.Generator, current: Tokenized) -> Callable[[int], np.ndarray | None]:
        """A function that gives sentences of a remembered document, as many tokens as are wanted."""

        def text(wanted: int) -> np.ndarray | None:
            # Of another turn or record: the same document comes again in every epoch.
            others = [text for text in self._remembered if text.place[1:3] != current.place[1:3]]
            if not others:
                return None
            chosen = others[rng.integers(len(others))]
            first = int(rng.integers(len(chosen.edges) - 1))
            start = chosen.edges[first]
            last = min(int(np.searchsorted(chosen.edges, start + wanted)), len(chosen.edges) - 1)
            return chosen.tokens[start : chosen.edges[last]]

        return text

    def state(self) -> dict[str, Any]:
        first = self._remembered[0] if self._remembered else self._current
        place = first.place if first else self._place
        chunk = self._chunk if self._current else None
        return {**place._asdict(), "remembered": len(self._remembered), "chunk": chunk}

    def restore(self, state: dict[str, Any]) -> None:
        self._open(Place(**{key: state[key] for key in Place._fields}))
        self._remembered.clear()
        self._remembered.extend(self._read() for _ in range(state["remembered"]))
        self._current, self._chunk = None, 0
        if state["chunk"] is not None:
            self._current, self._chunk = self._read(), state["chunk"]

    def too_little(self) -> Text:
        return "the training documents have no text"
