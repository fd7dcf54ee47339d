"""Lanes of a stream: parts that are read side by side, each in its own order, so that ranks read other files.

A stream of n files has L lanes, and lane l reads files l, l + L, l + 2 L, ... epoch after epoch. Every rank
that reads a lane gets the same items from it. A place in a lane is the file and the record in it, so that a
resumed run opens the right file at the right record.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from data.text.sources.documents import Source
from recipes.problems import Problem, ProblemsError, Text, pieces

MOST_LANES = 64  # files that a single rank may have to hold open


def lane_count(global_batch: int, shards: int) -> int:
    """Most lanes, of no more than there are files, that share a global batch evenly."""
    most = min(shards, MOST_LANES, global_batch)
    return next(count for count in range(most, 0, -1) if global_batch % count == 0)


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


class Reader(Protocol):
    """Encoded documents of a lane."""

    source: Source

    def epoch_from(self, place: Place) -> Iterator[tuple[Placed, Any]]:
        """(document, what `encode` makes of it) from `place` to the end of its epoch."""
        ...


@dataclass
class LaneReader:
    """Training documents of one lane, encoded."""

    source: Source
    lane: int
    lanes: int
    encode: Encode
    is_training: Callable[[int], bool]  # of an index within a file

    def epoch_from(self, place: Place) -> Iterator[tuple[Placed, Any]]:
        return self.encode(self._documents(place))

    def _documents(self, place: Place) -> Iterator[Placed]:
        total = self.source.shards
        every = [(self.lane + i) % total for i in range(total)]
        files = every if place.wide else range(self.lane, total, self.lanes)
        for turn in range(place.turn, len(files)):
            start = place.record if turn == place.turn else 0
            for document in self.source.shard_documents(files[turn], start):
                if self.is_training(document.index):
                    yield Placed(place._replace(turn=turn, record=document.index), document.text)


class Lane(ABC):
    """Items of one lane, one after another."""

    def __init__(self, reader: Reader):
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
    def too_little(self) -> Text:
        """Why all files together give no item."""

    def _open(self, place: Place) -> None:
        self._place = place
        self._whole = place.turn == place.record == 0  # this epoch is read from its beginning
        self._fruitful = False  # it has given an item
        self._encoded = self.reader.epoch_from(place)

    def _open_next_epoch(self) -> None:
        barren = self._whole and not self._fruitful
        if barren and self._place.wide:
            came = (f"{self.reader.source.name}: ", *pieces(self.too_little()))
            raise ProblemsError([Problem("data.name", came, fix="give more text")])
        self._open(Place(self._place.epoch + 1, wide=self._place.wide or barren))
