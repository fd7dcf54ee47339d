"""BERT samples of a stream: the same chunks and segments as from a store, in the stream's order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.samples.bert import BertSettings, Sample, assemble, generator, segments
from data.samples.chunks import chunks_of_document
from data.samples.masking import BertVocabulary
from data.streams.lanes import Lane, Place

REMEMBERED = 16  # documents of a lane that the random segments of NSP are taken from


@dataclass(frozen=True)
class Text:
    """A document as one run of tokens."""

    place: Place
    tokens: np.ndarray  # (L,)
    edges: np.ndarray  # (S + 1,) where sentences begin, and L
    starts: np.ndarray  # (C,) where chunks begin
    lengths: np.ndarray  # (C,)

    @property
    def identity(self) -> tuple[int, int]:
        return self.place.turn, self.place.record


def text_of(number: int, place: Place, sentences: list[np.ndarray], settings: BertSettings) -> Text:
    """
    Args:
        number: of the lane; with the place it decides the random lengths of chunks.
    """
    sizes = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    # Without the epoch: as in a store, a document is always cut into the same chunks.
    document = (number << 48) ^ (place.turn << 32) ^ place.record
    starts, lengths = chunks_of_document(sizes, document, settings.lengths)
    return Text(place, np.concatenate(sentences), np.concatenate([[0], np.cumsum(sizes)]), starts, lengths)


class BertLane(Lane):
    """One sample per chunk. An item is a function of (seed, lane, item) and of the last REMEMBERED documents.

    The state names the first document that is remembered: a resumed run reads from there, so that it remembers the same ones.
    """

    def __init__(self, reader: Any, number: int, settings: BertSettings, vocabulary: BertVocabulary):
        self._number, self._settings, self._vocabulary = number, settings, vocabulary
        self._remembered: deque[Text] = deque(maxlen=REMEMBERED)
        self._current: Text | None = None
        self._chunk = 0  # of the current document, that comes next
        super().__init__(reader)

    def take(self, item: int, seed: int) -> Sample:
        text, chunk = self._next_chunk()
        start, length = int(text.starts[chunk]), int(text.lengths[chunk])
        inside = text.edges[(text.edges > start) & (text.edges < start + length)] - start
        rng = generator(seed, self._number, item)
        first, second, label = segments(
            rng,
            text.tokens[start : start + length],
            inside,
            self._settings.sentence_head,
            self._other(rng, text),
        )
        return assemble(rng, first, second, label, self._vocabulary, self._settings)

    def skip(self) -> None:
        self._next_chunk()

    def _next_chunk(self) -> tuple[Text, int]:
        while self._current is None or self._chunk == len(self._current.starts):
            following = self._read()
            if self._current is not None:
                self._remembered.append(self._current)
            self._current, self._chunk = following, 0
        self._chunk += 1
        return self._current, self._chunk - 1

    def _read(self) -> Text:
        while True:
            if (found := next(self._encoded, None)) is None:
                self._open_next_epoch()
                continue
            document, sentences = found
            if sentences:
                self._fruitful = True
                return text_of(self._number, document.place, sentences, self._settings)

    def _other(self, rng: np.random.Generator, current: Text) -> Callable[[int], np.ndarray | None]:
        """Gives sentences of a remembered document, from a random one on, until they have as many tokens as are wanted."""

        def text(wanted: int) -> np.ndarray | None:
            others = [text for text in self._remembered if text.identity != current.identity]
            if not others:
                return None
            chosen = others[rng.integers(len(others))]
            first = int(rng.integers(len(chosen.edges) - 1))
            start = chosen.edges[first]
            end = chosen.edges[min(int(np.searchsorted(chosen.edges, start + wanted)), len(chosen.edges) - 1)]
            return chosen.tokens[start:end]

        return text

    def state(self) -> dict[str, Any]:
        first = self._remembered[0] if self._remembered else self._current
        place = first.place if first else self._place
        return {
            **place._asdict(),
            "remembered": len(self._remembered),
            "chunk": self._chunk if self._current else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._open(Place(**{key: state[key] for key in Place._fields}))
        self._remembered.clear()
        self._remembered.extend(self._read() for _ in range(state["remembered"]))
        self._current, self._chunk = (
            (self._read(), state["chunk"]) if state["chunk"] is not None else (None, 0)
        )

    def too_little(self) -> str:
        return "the training documents have no text"
