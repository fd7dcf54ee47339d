"""Samples of streams, tokenized while they arrive, for data sets too large to prepare first.

A stream is read in lanes (`lanes.py`). With G samples in a full batch, sample s * G + j is item s * (G / L) +
j % (G / L) of lane j // (G / L), under every layout. A rank opens only the lanes of its rows, which change in
smaller steps. Samples come in the order of their documents, which data.shuffle_buffer shuffles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data.cache import Say
from data.samples.fields import Fields
from data.samples.lanes import REMEMBERED, Lane, refuse_state
from data.text.records import Source


@dataclass(frozen=True)
class Lanes:
    """The lanes of a stream: their number, a function to open one, and a function to stack their items."""

    source: Source
    count: int
    open: Callable[[int], Lane]  # the number of a lane
    stack: Callable[[Sequence[Any]], Fields]
    buffer: int = 0  # documents to shuffle among, of each lane; 0: none


class StreamedSamples:
    """Samples of a stream. Lanes are read forward; going back reads a lane from its start, which is slow."""

    random_access = False

    def __init__(self, lanes: Lanes, sequence_length: int, global_batch: int, say: Say = print):
        """Begin all lanes at their beginnings.

        Args:
            global_batch: samples per step; the number of lanes divides it.
            say: prints a line where a lane has to be read again from its beginning.
        """
        assert global_batch % lanes.count == 0, "lane_count gives a divisor"
        self.sequence_length = sequence_length
        self._lanes, self._global, self._say = lanes, global_batch, say
        self._rows = global_batch // lanes.count  # of one lane, in a step
        self._forget()

    def _forget(self) -> None:
        self._open: dict[int, Lane] = {}
        self._next: dict[int, int] = {}  # next item of each open lane
        self._saved: dict[int, dict[str, Any]] = {}  # states of lanes not yet opened
        self._saved_at = 0  # position of these states

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        taken = []
        for position in positions:
            step, row = divmod(position, self._global)
            number, within = divmod(row, self._rows)
            item = step * self._rows + within
            lane = self._lane_at(number, item)
            self._next[number] = item + 1
            taken.append(lane.take(item, seed))
        return self._lanes.stack(taken)

    def _lane_at(self, number: int, item: int) -> Lane:
        """Return a lane, with `item` as its next one."""
        if number not in self._open:
            self._open[number], self._next[number] = self._lanes.open(number), 0
            if number in self._saved:
                self._open[number].restore(self._saved[number])
                self._next[number] = self._item(self._saved_at, number)
            elif self._item(self._saved_at, number):
                missing = f"the checkpoint does not say where lane {number} of {self._lanes.count} stood"
                reading = "reading its files from the start, which is right and slow"
                self._say(f"{self._lanes.source.name}: {missing}; {reading}")
        if self._next[number] > item:
            self._open[number], self._next[number] = self._lanes.open(number), 0
        lane = self._open[number]
        while self._next[number] < item:
            lane.skip()
            self._next[number] += 1
        return lane

    def _item(self, position: int, number: int) -> int:
        """Return the next item of a lane at a position."""
        step, row = divmod(position, self._global)
        return step * self._rows + min(max(row - number * self._rows, 0), self._rows)

    def state(self, position: int) -> dict[str, Any]:
        """Return the states of this rank's lanes before the sample at `position`, as JSON values."""
        items = {number: self._item(position, number) for number in {*self._saved, *self._open}}
        # A part of a blend may not have been read since the restart, nor a lane by a small step.
        lanes = {n: saved for n, saved in self._saved.items() if items[n] == self._item(self._saved_at, n)}
        # Of a lane that other ranks have read on, the last of them knows the state.
        lanes |= {n: lane.state() for n, lane in self._open.items() if self._next[n] == items[n]}
        lanes_by_name = {str(number): lanes[number] for number in sorted(lanes)}
        return {"position": position, **self._shape(), "lanes": lanes_by_name}

    def _shape(self) -> dict[str, int]:
        return {"files": self._lanes.source.shards, "lane_count": self._lanes.count}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state`.

        Raises ValueError: it is of another number of files or lanes, or names places that none is.
        """
        here = self._shape()
        then = {key: state.get(key, "none") for key in here}
        if then != here:
            came = (
                f"the checkpoint read {then['files']} files in {then['lane_count']} lanes, and now there are"
            )
            rule = f"{here['files']} in {here['lane_count']}: the samples of a step would be others"
            fix = "resume with the same files and batch.global"
            raise ValueError(f"{self._lanes.source.name}: {came} {rule}; {fix}")
        self._forget()
        lanes, last = state.get("lanes"), self._lanes.count - 1
        if not isinstance(lanes, dict) or not lanes.keys() <= {*map(str, range(last + 1))}:
            refuse_state(self._lanes.source, lanes, f"lanes are numbered from 0 to {last}")
        self._saved = {int(number): self._checked(int(number), saved) for number, saved in lanes.items()}
        self._saved_at = state["position"]

    def _checked(self, number: int, saved: Any) -> dict[str, Any]:
        """Check the form of a lane's state and return it. Raises FileError."""
        like, total = self._lanes.open(number).state(), self._lanes.source.shards
        if not isinstance(saved, dict) or saved.keys() != like.keys():
            refuse_state(self._lanes.source, saved, f"a lane's has {', '.join(like)}")
        turns = total if saved["wide"] else len(range(number, total, self._lanes.count))
        most = {"wide": 1, "turn": turns - 1, "remembered": REMEMBERED, "taken": self._lanes.buffer - 1}
        for key, value in saved.items():
            sound = type(value) is type(like[key]) or (key == "chunk" and type(value) is int)
            if not sound or not 0 <= (value or 0) <= most.get(key, 2**62):
                refuse_state(self._lanes.source, saved, f"no lane has {key}={str(value)[:40]}")
        return saved

    def fresh(self) -> StreamedSamples:
        return StreamedSamples(self._lanes, self.sequence_length, self._global, self._say)
