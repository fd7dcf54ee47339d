"""A meeting of all ranks: what they tell each other outside of training, and how they end together.

One process meets nobody, and needs nothing of launch/ranks/ranks_meeting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import TypeAdapter

from launch.ranks import ending
from launch.ranks.processes import TIMEOUT

T = TypeVar("T")


class Meeting:
    """The meeting of one process; of several it is a `RanksMeeting`. Its methods are collective.

    Attributes:
        store: torch's store where ranks met, for the process group; None before, and for one process.
        places: the ranks that this one knows: on rank 0 all, on another rank 0 and itself.
    """

    store: Any = None
    places: Mapping[int, Any] = {}

    def all_or_none(self, check: Callable[[], T], patience: timedelta = TIMEOUT) -> T:
        """Return what `check` returns on this rank, once it has returned on all of them.

        Where it raises ValueError on any, rank 0 says each different message once, and all ranks end with
        exit code 2. `patience`: that ranks have for the slowest.
        """
        try:
            return check()
        except ValueError as e:
            ending.refuse(e)

    def once(self, make: Callable[[], T], form: TypeAdapter[T]) -> T:
        """Run `make` only on rank 0; return its result on all. Within a check of `all_or_none`.

        `form`: of the value, which travels as JSON. Raises ValueError on all ranks where `make` does, or
        rank 0 before it.
        """
        return make()

    def from_rank_0(self, value: T) -> T:
        """Return rank 0's `value`, in JSON's types."""
        return value

    def to_rank_0(self, value: T) -> list[T]:
        """Gather every rank's `value`, in JSON's types, on rank 0; others get their own."""
        return [value]

    def compare(self, own: T, judge: Callable[[list[T]], None]) -> None:
        """Let rank 0 `judge` the values of all ranks; if it refuses, all ranks end.

        `own` has JSON's types; `judge` gets a list in the order of ranks, and raises ValueError.
        """

    def end(self) -> None:
        """Let ranks end by themselves from now on: they are done, or all of them refuse."""
