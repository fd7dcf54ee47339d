"""Streams: samples that are tokenized while they arrive, for data sets too large to prepare first.

A stream of n files has L lanes, parts that are read side by side, so that ranks read different files. Lane l
reads files l, l + L, l + 2 L, ... epoch after epoch. Every rank that reads a lane gets the same items from
it. A place in a lane is the file and the record in it, so that a resumed run opens the right file at the
right record.

With G samples in a full batch, sample s * G + j is item s * (G / L) + j % (G / L) of lane j // (G / L), under
every layout. A rank opens only the lanes of its rows, which change in smaller steps.

A lane may shuffle: document k of an epoch comes in the order of k + d, where d is below the size of the
lane's buffer and drawn only from (seed, lane, epoch, k). The document waits in the buffer while an unread one
could come before it. To have it first again, a resumed run reads from the oldest document that waits with
it, and leaves out as many as have come before.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from data.durable_files import Say
from data.keyed_random import generator
from data.samples.fields import Fields
from data.text.documents import Source
from recipes import files
from recipes.problems import ProblemsError, Words

MOST_LANES = 64  # a single rank may hold a file of each open
REMEMBERED = 16  # last documents of a BERT's lane, for the random segments of NSP


def lane_count(global_batch: int, shards: int) -> int:
    """Return the largest number of lanes, up to the number of files, that divides the global batch."""
    most = min(shards, MOST_LANES, global_batch)
    return next(count for count in range(most, 0, -1) if global_batch % count == 0)


class LanePlace(NamedTuple):
    """The place of a document in a lane; where a lane shuffles, `start` is the place to read from for it."""

    epoch: int = 0
    turn: int = 0  # position in the lane's list of files
    record: int = 0  # in the file
    # all files are read, the lane's own first: these hold less than one sample
    wide: bool = False
    # documents of the epoch before this place, where a lane shuffles
    before: int | None = None
    taken: int | None = None  # documents from here on that have come already
    start: LanePlace | None = None

    def state(self) -> dict[str, Any]:
        """Return the place to read from, as JSON values."""
        values = (self.start or self)._asdict()
        return {key: value for key, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PlacedDocument:
    """A document and its place, for an encoder."""

    place: LanePlace
    text: str

    @property
    def index(self) -> int:
        return self.place.record


Encode = Callable[[Iterable[PlacedDocument]], Iterator[tuple[PlacedDocument, Any]]]


@dataclass
class LaneReader:
    """Reader and encoder of the training documents of one lane."""

    source: Source
    lane: int
    lanes: int
    encode: Encode
    is_training: Callable[[int], bool]  # of an index within a file
    seed: int = 0  # of the shuffling
    # documents to shuffle among; 0: they come in the order of their files
    buffer: int = 0

    @property
    def beginning(self) -> LanePlace:
        if self.buffer:
            return LanePlace(before=0, taken=0)
        return LanePlace()

    def epoch_from(self, place: LanePlace) -> Iterator[tuple[PlacedDocument, Any]]:
        """Yield (document, its encoded text) from `place` to the end of its epoch."""
        documents = self._documents(place)
        if self.buffer:
            documents = itertools.islice(
                self._shuffled(documents, place), place.taken, None
            )
        return self.encode(documents)

    def _shuffled(
        self, documents: Iterator[PlacedDocument], place: LanePlace
    ) -> Iterator[PlacedDocument]:
        """Yield the documents from `place` on in their shuffled order, those that have come as well."""
        waiting = OrderedDict[int, PlacedDocument]()  # by number in the epoch
        # heap of (number + draw, number) of those that wait
        order = list[tuple[int, int]]()
        given = first = place.before or 0
        seed = self.seed + ((self.lane + 1) << 64)  # no generator of samples has it

        def up_to(last: float) -> Iterator[PlacedDocument]:
            nonlocal given
            while order and order[0][0] <= last:
                oldest, document = next(iter(waiting.items()))
                start = document.place._replace(before=oldest, taken=given - oldest)
                document = waiting.pop(heapq.heappop(order)[1])
                yield PlacedDocument(
                    document.place._replace(start=start), document.text
                )
                given += 1

        for number, document in enumerate(documents, first):
            waiting[number] = document
            draw = int(generator(seed, place.epoch, number).integers(self.buffer))
            heapq.heappush(order, (number + draw, number))
            yield from up_to(number + 1)
        yield from up_to(math.inf)

    def _documents(self, place: LanePlace) -> Iterator[PlacedDocument]:
        total = self.source.shards
        every = [(self.lane + i) % total for i in range(total)]
        files = every if place.wide else range(self.lane, total, self.lanes)
        for turn in range(place.turn, len(files)):
            start = place.record if turn == place.turn else 0
            for document in self.source.shard_documents(files[turn], start):
                if self.is_training(document.index):
                    here = LanePlace(place.epoch, turn, document.index, place.wide)
                    yield PlacedDocument(here, document.text)


class Lane(ABC):
    """Items of one lane, one after another."""

    def __init__(self, reader: LaneReader):
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
    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`. Raises FileError: it names a place that is none."""

    def _open(self, place: LanePlace) -> None:
        self._place = place
        # The epoch is read from its beginning, maybe with a document that is not for training.
        self._whole = place.turn == place.record == 0 and not place.taken
        self._fruitful = False  # the epoch has given an item
        self._encoded: Iterator[tuple[PlacedDocument, Any]] = self.reader.epoch_from(
            place
        )

    def _resume(self, state: dict[str, Any]) -> Any:
        """Open the place of a state; return its encoded document. Raises FileError if there is none."""
        self._open(
            place := LanePlace(
                **{key: state[key] for key in LanePlace._fields if key in state}
            )
        )
        first = list(itertools.islice(self._encoded, 1))
        if not self._whole and [
            document.place.start or document.place for document, _ in first
        ] != [place]:
            refuse_state(self.reader.source, state, "no training document stands there")
        self._encoded = itertools.chain(first, self._encoded)
        return first[0][1] if first else ()

    def _open_next_epoch(self, *too_little: Words) -> None:
        """Begin the next epoch; `too_little` says why all files together give no item."""
        barren = self._whole and not self._fruitful
        if barren and self._place.wide:
            came = (f"{self.reader.source.name}: the training documents ", *too_little)
            raise ProblemsError.of("data.name", came, fix="give more text")
        self._open(LanePlace(self._place.epoch + 1, wide=self._place.wide or barren))


def refuse_state(source: Source, state: Any, rule: str) -> NoReturn:
    """Refuse a place that a checkpoint names. Raises FileError."""
    files.refuse(
        source.name,
        f"the checkpoint's place in the data is {str(state)[:150]}",
        rule,
        "restore it",
    )


@dataclass(eq=False)
class StreamedSamples:
    """Samples of a stream. Lanes are read forward; going back reads a lane from its start, which is slow.

    Attributes:
        open_lane: opens the lane of a number.
        stack: stacks items of lanes.
        global_batch: samples per step; the number of lanes divides it.
        buffer: documents to shuffle among, of each lane; 0: none.
        say: prints a line where a lane has to be read again from its beginning.
    """

    random_access = False
    source: Source
    lanes: int
    open_lane: Callable[[int], Lane]
    stack: Callable[[Sequence[Any]], Fields]
    global_batch: int
    buffer: int
    say: Say

    def __post_init__(self) -> None:
        assert self.global_batch % self.lanes == 0, "lane_count gives a divisor"
        self._rows = self.global_batch // self.lanes  # of one lane, in a step
        self._forget()

    def _forget(self) -> None:
        self._open: dict[int, Lane] = {}
        self._next: dict[int, int] = {}  # next item of each open lane
        self._saved: dict[int, dict[str, Any]] = {}  # states of lanes not yet opened
        self._saved_at = 0  # position of these states

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        taken = []
        for position in positions:
            step, row = divmod(position, self.global_batch)
            number, within = divmod(row, self._rows)
            item = step * self._rows + within
            lane = self._lane_at(number, item)
            self._next[number] = item + 1
            taken.append(lane.take(item, seed))
        return self.stack(taken)

    def _lane_at(self, number: int, item: int) -> Lane:
        """Return a lane, with `item` as its next one."""
        if number not in self._open:
            self._open[number] = self.open_lane(number)
            self._next[number] = 0
            if number in self._saved:
                self._open[number].restore(self._saved[number])
                self._next[number] = self._item(self._saved_at, number)
            elif self._item(self._saved_at, number):
                missing = f"the checkpoint does not say where lane {number} of {self.lanes} stood"
                self.say(
                    f"{self.source.name}: {missing}; "
                    "reading its files from the start, which is right and slow"
                )
        if self._next[number] > item:
            self._open[number] = self.open_lane(number)
            self._next[number] = 0
        lane = self._open[number]
        while self._next[number] < item:
            lane.skip()
            self._next[number] += 1
        return lane

    def _item(self, position: int, number: int) -> int:
        """Return the next item of a lane at a position."""
        step, row = divmod(position, self.global_batch)
        return step * self._rows + min(max(row - number * self._rows, 0), self._rows)

    def state(self, position: int) -> dict[str, Any]:
        """Return the states of this rank's lanes before the sample at `position`, as JSON values."""
        # A part of a blend may not have been read since the restart, nor a lane by a small step.
        lanes = {
            n: saved
            for n, saved in self._saved.items()
            if self._item(position, n) == self._item(self._saved_at, n)
        }
        # Of a lane that other ranks have read on, the last of them knows the state.
        lanes |= {
            n: lane.state()
            for n, lane in self._open.items()
            if self._next[n] == self._item(position, n)
        }
        lanes_by_name = {str(number): lanes[number] for number in sorted(lanes)}
        return {"position": position, **self._shape(), "lanes": lanes_by_name}

    def _shape(self) -> dict[str, int]:
        return {"files": self.source.shards, "lane_count": self.lanes}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`.

        Raises ValueError: it is of another number of files or lanes, or names places that none is.
        """
        here = self._shape()
        then = {key: state.get(key, "none") for key in here}
        if then != here:
            came = f"the checkpoint read {then['files']} files in {then['lane_count']} lanes, and now"
            rule = f"there are {here['files']} in {here['lane_count']}: the samples of a step would be others"
            raise ValueError(
                f"{self.source.name}: {came} {rule}; "
                "resume with the same files and batch.global"
            )
        self._forget()
        lanes = state.get("lanes")
        last = self.lanes - 1
        if not isinstance(lanes, dict) or not lanes.keys() <= {
            *map(str, range(last + 1))
        }:
            refuse_state(self.source, lanes, f"lanes are numbered from 0 to {last}")
        self._saved = {
            int(number): self._checked(int(number), saved)
            for number, saved in lanes.items()
        }
        self._saved_at = state["position"]

    def _checked(self, number: int, saved: Any) -> dict[str, Any]:
        """Check the form of a lane's state and return it. Raises FileError."""
        like = self.open_lane(number).state()
        total = self.source.shards
        if not isinstance(saved, dict) or saved.keys() != like.keys():
            refuse_state(self.source, saved, f"a lane's has {', '.join(like)}")
        turns = total if saved["wide"] else len(range(number, total, self.lanes))
        most = {
            "wide": 1,
            "turn": turns - 1,
            "remembered": REMEMBERED,
            "taken": self.buffer - 1,
        }
        for key, value in saved.items():
            sound = type(value) is type(like[key]) or (
                key == "chunk" and type(value) is int
            )
            if not sound or not 0 <= (value or 0) <= most.get(key, 2**62):
                refuse_state(self.source, saved, f"no lane has {key}={str(value)[:40]}")
        return saved

    def fresh(self) -> StreamedSamples:
        copied = copy.copy(self)
        copied._forget()
        return copied
