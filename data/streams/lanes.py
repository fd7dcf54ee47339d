"""Lanes of a stream: parts that are read side by side, each in its own order, so that ranks can read different files.

A stream of n files has L lanes, and lane l reads files l, l + L, l + 2 L, ... epoch after epoch. Every rank that reads a lane
gets the same items from it. A place in a lane is the file and the record in it, so that a resumed run opens the right file
at the right record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data.sources.documents import Source

MOST_LANES = 64  # files that a single rank may have to hold open


def lane_count(global_batch: int, shards: int) -> int:
    """Most lanes, of no more than there are files, that share a global batch evenly."""
    return max(
        count for count in range(1, min(shards, MOST_LANES, global_batch) + 1) if global_batch % count == 0
    )


class Place(NamedTuple):
    """Where a document stands in a lane."""

    epoch: int = 0
    turn: int = 0  # position in the lane's list of files
    record: int = 0  # in the file
    wide: bool = False  # the lane's own files hold less than one sample: it reads all files, its own first


@dataclass(frozen=True, slots=True)
class Placed:
    """A document and its place; what an encoder takes for a document."""

    place: Place
    text: str

    @property
    def index(self) -> int:
        return self.place.record


Encode = Callable[[Iterable[Placed]], Iterator[tuple[Placed, Any]]]


@dataclass(frozen=True)
class LaneReader:
    """Training documents of one lane, encoded."""

    source: Source
    lane: int
    lanes: int
    encode: Encode
    is_training: Callable[[int], bool]  # of an index within a file

    def epoch_from(self, place: Place) -> Iterator[tuple[Placed, Any]]:
        """(document, what `encode` makes of it) from `place` to the end of its epoch."""
        return self.encode(self._documents(place))

    def _documents(self, place: Place) -> Iterator[Placed]:
        files = self.files(place.wide)
        for turn in range(place.turn, len(files)):
            start = place.record if turn == place.turn else 0
            for document in self.source.shard_documents(files[turn], start):
                if self.is_training(document.index):
                    yield Placed(place._replace(turn=turn, record=document.index), document.text)

    def files(self, wide: bool) -> list[int]:
        total = self.source.shards
        return (
            [(self.lane + i) % total for i in range(total)]
            if wide
            else list(range(self.lane, total, self.lanes))
        )


class Lane(ABC):
    """Items of one lane, one after another."""

    def __init__(self, reader: LaneReader):
        self.reader = reader
        self._open(Place())

    @abstractmethod
    def take(self, item: int, seed: int) -> Any:
        """The next item, for the family's `stack`; `item` is its number in the lane."""

    @abstractmethod
    def skip(self) -> None:
        """Passes the next item over."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """JSON-able: where the next item begins."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def too_little(self) -> str:
        """Why all files together give no item."""

    def _open(self, place: Place) -> None:
        self._place = place
        self._whole = place.turn == place.record == 0  # this epoch is read from its beginning
        self._fruitful = False  # it has given an item
        self._encoded = self.reader.epoch_from(place)

    def _open_next_epoch(self) -> None:
        barren = self._whole and not self._fruitful
        if barren and self._place.wide:
            raise ValueError(f"{self.reader.source.name}: {self.too_little()}: give more text")
        self._open(Place(self._place.epoch + 1, wide=self._place.wide or barren))


class GptLane(Lane):
    """Windows of T + 1 tokens over the lane's documents; the next window begins with the last label of this one.

    A rest shorter than a window is left out at the end of an epoch, as at the end of stored tokens.
    """

    def __init__(self, reader: LaneReader, sequence_length: int):
        self._length = sequence_length
        super().__init__(reader)

    def take(self, item: int, seed: int) -> np.ndarray:
        """(T + 1,) int64. The seed has no part in it: a stream is read in its own order."""
        self._fill()
        parts, missing, skip = [], self._length + 1, self._offset
        for _, ids in self._pending:
            parts.append(ids[skip : skip + missing])
            missing -= parts[-1].size
            skip = 0
            if not missing:
                break
        self._use()
        return np.concatenate(parts).astype(np.int64)

    def skip(self) -> None:
        self._fill()
        self._use()

    def state(self) -> dict[str, Any]:
        place = self._pending[0][0] if self._pending else self._place
        return {**place._asdict(), "token_offset": self._offset}

    def restore(self, state: dict[str, Any]) -> None:
        offset = state["token_offset"]
        self._open(Place(**{key: state[key] for key in Place._fields}))
        self._offset, self._fruitful = offset, offset > 0

    def too_little(self) -> str:
        return (
            f"the training documents have {self._buffered} tokens, and one sample of sequence_length={self._length} needs "
            f"{self._length + 1}"
        )

    def _open(self, place: Place) -> None:
        super()._open(place)
        self._offset = 0  # tokens of the first pending document that are used up
        self._pending: deque[tuple[Place, np.ndarray]] = deque()  # documents that are not wholly used
        self._buffered = 0  # tokens in `_pending`, those before the offset included

    def _fill(self) -> None:
        while self._buffered < self._offset + self._length + 1:
            if (found := next(self._encoded, None)) is None:
                self._open_next_epoch()
                continue
            document, ids = found
            self._pending.append((document.place, ids))
            self._buffered += ids.size
            self._place = document.place._replace(record=document.place.record + 1)

    def _use(self) -> None:
        self._fruitful = True
        self._offset += self._length
        while self._pending and self._offset >= self._pending[0][1].size:
            used = self._pending.popleft()[1].size
            self._offset -= used
            self._buffered -= used
