"""Lanes of a stream: parts read side by side, so that ranks read different files.

A stream of n files has L lanes, and lane l reads files l, l + L, l + 2 L, ... epoch after epoch. Every rank
that reads a lane gets the same items from it. A place in a lane is the file and the record in it, so that a
resumed run opens the right file at the right record.

A lane may shuffle: document k of an epoch comes in the order of k + d, where d, below the size of the lane's
buffer, is drawn from (seed, lane, epoch, k) alone. It waits in the buffer while an unread document could come
before it. To have it first again, a resumed run reads from the oldest document that waits with it, and
leaves out as many as have come before.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from data.keyed_random import generator
from data.samples.bert import BertSettings, Sample, assemble, segments
from data.samples.chunks import chunks_of_document
from data.samples.masking import BertVocabulary
from data.text.records import Source
from recipes import files
from recipes.problems import Problem, ProblemsError, Setting, Text, Words, counted, pieces

MOST_LANES = 64  # a single rank may hold a file of each open


def lane_count(global_batch: int, shards: int) -> int:
    """Return the largest number of lanes, up to the number of files, that divides the global batch."""
    most = min(shards, MOST_LANES, global_batch)
    return next(count for count in range(most, 0, -1) if global_batch % count == 0)


class Place(NamedTuple):
    """The place of a document in a lane; where a lane shuffles, `start` is the place to read from for it."""

    epoch: int = 0
    turn: int = 0  # position in the lane's list of files
    record: int = 0  # in the file
    wide: bool = False  # all files are read, the lane's own first: these hold less than one sample
    before: int | None = None  # documents of the epoch before this place, where a lane shuffles
    taken: int | None = None  # documents from here on that have come already
    start: Place | None = None

    def state(self) -> dict[str, Any]:
        """Return the place to read from, as JSON values."""
        values = (self.start or self)._asdict()
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A document and its place, for an encoder."""

    place: Place
    text: str

    @property
    def index(self) -> int:
        return self.place.record


Encode = Callable[[Iterable[PlacedDocument]], Iterator[tuple[PlacedDocument, Any]]]


class Reader(Protocol):
    """Encoded documents of a lane."""

    source: Source

    @property
    def beginning(self) -> Place: ...

    def epoch_from(self, place: Place) -> Iterator[tuple[PlacedDocument, Any]]:
        """Yield (document, its encoded text) from `place` to the end of its epoch."""
        ...


@dataclass
class LaneReader:
    """Reader and encoder of the training documents of one lane."""

    source: Source
    lane: int
    lanes: int
    encode: Encode
    is_training: Callable[[int], bool]  # of an index within a file
    seed: int = 0  # of the shuffling
    buffer: int = 0  # documents to shuffle among; 0: they come in the order of their files

    @property
    def beginning(self) -> Place:
        return Place(before=0, taken=0) if self.buffer else Place()

    def epoch_from(self, place: Place) -> Iterator[tuple[PlacedDocument, Any]]:
        documents = self._documents(place)
        if self.buffer:
            documents = itertools.islice(self._shuffled(documents, place), place.taken, None)
        return self.encode(documents)

    def _shuffled(self, documents: Iterator[PlacedDocument], place: Place) -> Iterator[PlacedDocument]:
        """Yield the documents from `place` on in their shuffled order, those that have come as well."""
        waiting = OrderedDict[int, PlacedDocument]()  # by number in the epoch
        order = list[tuple[int, int]]()  # heap of (number + draw, number) of those that wait
        given = first = place.before or 0
        seed = self.seed + ((self.lane + 1) << 64)  # no generator of samples has it

        def up_to(last: float) -> Iterator[PlacedDocument]:
            nonlocal given
            while order and order[0][0] <= last:
                oldest, document = next(iter(waiting.items()))
                start = document.place._replace(before=oldest, taken=given - oldest)
                document = waiting.pop(heapq.heappop(order)[1])
                yield PlacedDocument(document.place._replace(start=start), document.text)
                given += 1

        for number, document in enumerate(documents, first):
            waiting[number] = document
            draw = int(generator(seed, place.epoch, number).integers(self.buffer))
            heapq.heappush(order, (number + draw, number))
            yield from up_to(number + 1)
        yield from up_to(math.inf)

    def _documents(self, place: Place) -> Iterator[PlacedDocument]:
        total = self.source.shards
        every = [(self.lane + i) % total for i in range(total)]
        files = every if place.wide else range(self.lane, total, self.lanes)
        for turn in range(place.turn, len(files)):
            start = place.record if turn == place.turn else 0
            for document in self.source.shard_documents(files[turn], start):
                if self.is_training(document.index):
                    found = Place(place.epoch, turn, document.index, place.wide)
                    yield PlacedDocument(found, document.text)


class Lane(ABC):
    """Items of one lane, one after another."""

    def __init__(self, reader: Reader):
        self.reader = reader
        self._open(reader.beginning)

    @abstractmethod
    def take(self, item: int, seed: int) -> Any:
        """The next item, for the family's `stack`; `item` is its number in the lane."""

    @abstractmethod
    def skip(self) -> None:
        """Pass over the next item."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the place of the next item as JSON values."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def too_little(self) -> Text:
        """Say why all files together give no item."""

    def _open(self, place: Place) -> None:
        self._place = place
        # The epoch is read from its beginning, maybe with a document that is not for training.
        self._whole = place.turn == place.record == 0 and not place.taken
        self._fruitful = False  # the epoch has given an item
        self._encoded: Iterator[tuple[PlacedDocument, Any]] = self.reader.epoch_from(place)

    def _resume(self, state: dict[str, Any]) -> Any:
        """Open the place of a state; return its encoded document. Raises FileError if there is none."""
        self._open(place := Place(**{key: state[key] for key in Place._fields if key in state}))
        first = list(itertools.islice(self._encoded, 1))
        if not self._whole and [document.place.start or document.place for document, _ in first] != [place]:
            refuse_state(self.reader.source, state, "no training document stands there")
        self._encoded = itertools.chain(first, self._encoded)
        return first[0][1] if first else ()

    def _open_next_epoch(self) -> None:
        barren = self._whole and not self._fruitful
        if barren and self._place.wide:
            came = (f"{self.reader.source.name}: ", *pieces(self.too_little()))
            raise ProblemsError([Problem("data.name", came, fix="give more text")])
        self._open(Place(self._place.epoch + 1, wide=self._place.wide or barren))


def refuse_state(source: Source, state: Any, rule: str) -> NoReturn:
    """Refuse a place that a checkpoint names. Raises FileError."""
    files.refuse(source.name, f"the checkpoint's place in the data is {str(state)[:150]}", rule, "restore it")


def too_short(tokens: int, sequence_length: int) -> tuple[Words, ...]:
    """Say why so many tokens give no sample."""
    length = Setting("sequence_length", sequence_length)
    return f"have {counted(tokens, 'token')}, and one sample of ", length, f" needs {sequence_length + 1}"


class GptLane(Lane):
    """Windows of T + 1 tokens over the lane's documents; each begins with the last label of the one before.

    A rest shorter than a window is left out at the end of an epoch, as at the end of a store.
    """

    def __init__(self, reader: Reader, sequence_length: int):
        self._length = sequence_length
        super().__init__(reader)

    def take(self, item: int, seed: int) -> np.ndarray:
        """Return the next window (T + 1,) int64, without use of the seed."""
        self._fill()
        parts, start = [], self._offset
        for _, ids in self._pending:
            parts.append(ids[max(start, 0) : max(start + self._length + 1, 0)])
            start -= ids.size
        self._use()
        return np.concatenate(parts).astype(np.int64)

    def skip(self) -> None:
        self._fill()
        self._use()

    def state(self) -> dict[str, Any]:
        place = self._pending[0][0] if self._pending else self._place
        return {**place.state(), "token_offset": self._offset}

    def restore(self, state: dict[str, Any]) -> None:
        size = len(self._resume(state))
        if state["token_offset"] >= max(size, 1):
            refuse_state(self.reader.source, state, f"the document there has {counted(size, 'token')}")
        self._offset = state["token_offset"]
        self._fruitful = self._offset > 0

    def too_little(self) -> Text:
        return "the training documents ", *too_short(self._buffered, self._length)

    def _open(self, place: Place) -> None:
        super()._open(place)
        self._offset = 0  # tokens used of the first pending document
        self._pending: deque[tuple[Place, np.ndarray]] = deque()  # documents not wholly used
        self._buffered = 0  # tokens in `_pending`, those before the offset included

    def _fill(self) -> None:
        while self._buffered < self._offset + self._length + 1:
            if (found := next(self._encoded, None)) is None:
                self._open_next_epoch()
                continue
            document, ids = found
            self._pending.append((document.place, ids))
            self._buffered += ids.size

    def _use(self) -> None:
        self._fruitful = True
        self._offset += self._length
        while self._pending and self._offset >= self._pending[0][1].size:
            used = self._pending.popleft()[1].size
            self._offset -= used
            self._buffered -= used


REMEMBERED = 16  # last documents of a lane, for the random segments of NSP


@dataclass(frozen=True)
class Tokenized:
    """A document as one run of tokens."""

    place: Place
    tokens: np.ndarray  # (L,)
    edges: np.ndarray  # (S + 1,) where sentences begin, and L
    starts: np.ndarray  # (C,) where chunks begin
    lengths: np.ndarray  # (C,)


def text_of(number: int, place: Place, sentences: list[np.ndarray], settings: BertSettings) -> Tokenized:
    """Join the sentences of a document and cut it into chunks.

    Args:
        number: of the lane; with the place it decides the random lengths of chunks.
    """
    sizes = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
    # Without the epoch: as in a store, a document is always cut into the same chunks.
    document = (number << 48) ^ (place.turn << 32) ^ place.record
    chunks = chunks_of_document(sizes, document, settings.lengths)
    return Tokenized(place, np.concatenate(sentences), np.concatenate([[0], np.cumsum(sizes)]), *chunks)


class BertLane(Lane):
    """One sample per chunk: a function of (seed, lane, item) and of the last REMEMBERED documents.

    The state names the first of these documents. A resumed run reads from there, so that it remembers the
    same ones.
    """

    def __init__(self, reader: Reader, number: int, settings: BertSettings, vocabulary: BertVocabulary):
        self._number, self._settings, self._vocabulary = number, settings, vocabulary
        self._remembered: deque[Tokenized] = deque(maxlen=REMEMBERED)
        self._current: Tokenized | None = None
        self._chunk = 0  # the next one of the current document
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
        """Return a function to take sentences of a remembered document, of a wanted number of tokens."""

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
        return {**place.state(), "remembered": len(self._remembered), "chunk": chunk}

    def restore(self, state: dict[str, Any]) -> None:
        self._resume(state)
        self._remembered.clear()
        self._remembered.extend(self._read() for _ in range(state["remembered"]))
        self._current, self._chunk = None, 0
        if state["chunk"] is not None:
            self._current, self._chunk = self._read(), state["chunk"]
            if self._chunk > (chunks := len(self._current.starts)):
                refuse_state(self.reader.source, state, f"the document there has {counted(chunks, 'chunk')}")

    def too_little(self) -> Text:
        return "the training documents have no text"
