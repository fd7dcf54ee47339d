"""Datasets that are tokenized while they stream in, for those too large to prepare first.

A stream is read in lanes (`lanes.py`). Of the global batch of G samples, row j of step s is item s * (G / L)
+ j % (G / L) of lane j // (G / L): a rank opens only the lanes that its rows touch, and the batch of a step
depends on G and L and on no layout. Sampling is in the stream's order; shuffle a dataset before, or prepare
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data.cache import Say
from data.samples.fields import Fields
from data.sources.documents import Source
from data.streams.lanes import Lane


@dataclass(frozen=True)
class Lanes:
    """How many lanes a stream is read in, how one is opened at its beginning, and what their items become."""

    source: Source
    count: int
    open: Callable[[int], Lane]  # the number of a lane
    stack: Callable[[Sequence[Any]], Fields]


class StreamedSamples:
    """Samples of a stream. Each lane is read forward; going back starts it again, which is right and slow."""

    random_access = False

    def __init__(self, lanes: Lanes, sequence_length: int, global_batch: int, say: Say = print):
        """Samples of all lanes, each from its beginning.

        Args:
            global_batch: samples per step; the number of lanes divides it.
            say: told where a lane has to be read again from its beginning.
        """
        assert global_batch % lanes.count == 0, "lane_count gives a divisor"
        self.sequence_length = sequence_length
        self._lanes, self._global, self._say = lanes, global_batch, say
        self._rows = global_batch // lanes.count  # of one lane, in a step
        self._forget()

    def _forget(self) -> None:
        self._open: dict[int, Lane] = {}
        self._next: dict[int, int] = {}  # item that an open lane gives next
        self._saved: dict[int, dict[str, Any]] = {}  # of lanes that are not yet opened
        self._saved_item = 0

    def take(self, positions: Sequence[int], seed: int) -> Fields:
        return self._lanes.stack([self._take(*self._address(position), seed) for position in positions])

    def _address(self, position: int) -> tuple[int, int]:
        """(lane, item)"""
        if self._lanes.count == 1:
            return 0, position
        step, row = divmod(position, self._global)
        return row // self._rows, step * self._rows + row % self._rows

    def _take(self, number: int, item: int, seed: int) -> Any:
        lane = self._lane_at(number, item)
        self._next[number] = item + 1
        return lane.take(item, seed)

    def _lane_at(self, number: int, item: int) -> Lane:
        """The lane, so that `item` comes next."""
        if number not in self._open:
            self._begin(number)
        if self._next[number] > item:
            self._open[number], self._next[number] = self._lanes.open(number), 0
        lane = self._open[number]
        while self._next[number] < item:
            lane.skip()
            self._next[number] += 1
        return lane

    def _begin(self, number: int) -> None:
        lane, at = self._lanes.open(number), 0
        if number in self._saved:
            lane.restore(self._saved[number])
            at = self._saved_item
        elif self._saved_item:
            self._say(
                f"{self._lanes.source.name}: the checkpoint does not say where lane {number} of "
                f"{self._lanes.count} stood; reading its "
                "files from the start, which is right and slow"
            )
        self._open[number], self._next[number] = lane, at

    def state(self, position: int) -> dict[str, Any]:
        """Of the lanes that are open, before the first row of a step."""
        item = position if self._lanes.count == 1 else position // self._global * self._rows
        assert self._lanes.count == 1 or position % self._global == 0, "states are taken between steps"
        # A part of a blend may not have been read since the restart.
        unread = {number: saved for number, saved in self._saved.items() if item == self._saved_item}
        lanes = unread | {number: self._lane_at(number, item).state() for number in self._open}
        return {
            "position": position,
            "files": self._lanes.source.shards,
            "lane_count": self._lanes.count,
            "lanes": {str(number): lanes[number] for number in sorted(lanes)},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            ValueError: the stream had another number of files or lanes then.
        """
        source, here = (
            self._lanes.source,
            {"files": self._lanes.source.shards, "lane_count": self._lanes.count},
        )
        then = {key: state.get(key, "none") for key in here}
        if then != here:
            raise ValueError(
                f"{source.name}: the checkpoint read {then['files']} files in {then['lane_count']} lanes, "
                "and now there are "
                f"{here['files']} in {here['lane_count']}: the samples of a step would be others; resume "
                "with the same files and "
                "batch.global"
            )
        self._forget()
        item = state["position"] if self._lanes.count == 1 else state["position"] // self._global * self._rows
        self._saved = {int(number): saved for number, saved in state["lanes"].items()}
        self._saved_item = item

    def fresh(self) -> StreamedSamples:
        return StreamedSamples(self._lanes, self.sequence_length, self._global, self._say)
