"""The meeting of several ranks, each with one connection to rank 0 (launch/ranks/connection.py).

A connection carries refusals, so that one rank's refusal ends them all; facts of the start; the end of a
rank, so that its death ends all at once; and the questions of the watchdog. Without it the others would wait
for half an hour, or for days while a corpus is prepared: srun, unlike torchrun and deepspeed, does not end
them, and NCCL tells a waiting rank nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from data import durable_files
from launch.console import terminal
from launch.ranks import door, ending
from launch.ranks.connection import Connection, Kind, Message
from launch.ranks.meeting import Meeting
from launch.ranks.processes import TIMEOUT, rank, world_size
from recipes.problems import ProblemsError

T = TypeVar("T")
SAY_AFTER_S = 20.0  # that others are awaited
MAKING = timedelta(days=2)  # the longest work of rank 0 in `once`
# before a death is reported: meanwhile this rank may notice it, or a launcher end this rank
SETTLE_S = 5.0
# rank 0, which may serve the store, waits so long for others to hear why all end
LEAVE_S = 5.0


@dataclass(frozen=True)
class RankPlace:
    """The place of a rank."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


PLACE = TypeAdapter(RankPlace)


class RanksMeeting(Meeting):
    """All ranks of a launch, from the first exchange on."""

    def __init__(self, place: Path | None = None) -> None:
        """Do nothing yet. `place`: a directory of the run that all ranks see, if any exists already."""
        self.places: dict[int, RankPlace] = {}
        # What the watchdog answers, and what it does at the end of a run that hangs.
        self.status: Callable[[], Any] = lambda: None
        self.end_hanging: Callable[[], None] = lambda: os._exit(1)
        self._secrets = [durable_files.cache_directory(), place or Path.cwd()]
        self._exchanges = 0
        self._handed = 0
        self._connections: dict[int, Connection] = {}
        # by name of the exchange, and rank
        self._heard: dict[tuple[str, int], Any] = {}
        self._left: set[int] = set()  # ranks that end in order
        self._over = False
        self._changed = threading.Condition()

    # --- exchanges

    def all_or_none(self, check: Callable[[], T], patience: timedelta = TIMEOUT) -> T:
        refusal = None
        failure = None
        try:
            value = check()
        except ValueError as e:
            refusal = str(e)
        except Exception as e:
            refusal = repr(e)
            failure = e
        refused = self._exchange_refusals(refusal, patience)
        if failure:
            raise failure
        if refused:
            raise SystemExit(2)
        return value

    def once(self, make: Callable[[], T], form: TypeAdapter[T]) -> T:
        self._handed += 1
        name = f"handed {self._handed}"
        if rank() == 0:
            value = make()
            self._tell(name, form.dump_python(value, mode="json"))
            return value
        # in the `all_or_none` that this is a part of
        refusal = _refusal_of_rank_0(self._exchanges + 1)
        heard, told = self._hear([(name, 0), (refusal, 0)], MAKING)
        if heard == (refusal, 0):
            raise ValueError(told)
        return form.validate_python(told)

    def from_rank_0(self, value: T) -> T:
        name = self._next()
        if rank() == 0:
            self._tell(name, value)
        else:
            value = self._hear([(name, 0)], TIMEOUT)[1]
        return value

    def to_rank_0(self, value: T) -> list[T]:
        return self._gather(self._next(), value, TIMEOUT)

    def compare(self, own: T, judge: Callable[[list[T]], None]) -> None:
        everyone = self.to_rank_0(own)
        self.all_or_none(lambda: judge(everyone) if rank() == 0 else None)

    def _exchange_refusals(self, own: str | None, patience: timedelta) -> bool:
        """Exchange refusals; return whether there is one, which rank 0 has printed."""
        name = self._next()
        if rank() == 0 and own is not None:
            # for those that wait in `once`
            self._tell(_refusal_of_rank_0(self._exchanges), own)
        told = self._gather(f"{name}, refusals", (socket.gethostname(), own), patience)
        if rank() != 0:
            refused = bool(self._hear([(name, 0)], patience)[1])
            if refused:
                self.end()
            return refused
        text = sentences(told)
        if text:
            terminal.say(f"\n{text}\n", sys.stderr)
            ending.leave_to_torchrun(text)
        self._tell(name, bool(text))
        if text:
            self._wait(lambda: len(self._left) == world_size() - 1, LEAVE_S)
            self.end()
        return bool(text)

    def _gather(self, name: str, value: T, patience: timedelta) -> list[T]:
        if rank() != 0:
            self._tell(name, value)
            return [value]
        others = [
            self._hear([(name, other)], patience)[1] for other in range(1, world_size())
        ]
        return [value, *others]

    def _next(self) -> str:
        """Name the next exchange, which all ranks begin in the same order. The first one joins them."""
        if not self._connections:
            self._join()
        self._exchanges += 1
        return f"exchange {self._exchanges}"

    def _tell(self, name: str, value: Any) -> None:
        """Send the value to rank 0; rank 0 sends it to all others."""
        self._send(list(self._connections), "value", name, value)

    def _send(
        self, others: Collection[int], kind: Kind, key: str = "", value: Any = None
    ) -> None:
        text = Message(kind, key, value).encoded()
        for other in others:
            # it has ended, which its connection tells
            with contextlib.suppress(OSError):
                self._connections[other].send(text)

    def _hear(
        self, wanted: list[tuple[str, int]], patience: timedelta
    ) -> tuple[tuple[str, int], Any]:
        """Wait for the first of the values, of an exchange from a rank. Raises ProblemsError: none came."""

        def arrived() -> list[tuple[str, int]]:
            return [each for each in wanted if each in self._heard]

        self._wait(lambda: bool(arrived()), patience.total_seconds())
        with self._changed:
            for each in arrived():
                return each, self._heard.pop(each)
        silent = wanted[0][1]
        raise ProblemsError.of(
            "RANK",
            f"{self.places.get(silent, f'rank {silent}')} has told nothing for {patience}",
            "ranks start together",
            "what it printed last, or its machine, tells why; start again",
        )

    def _wait(self, there: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(there, min(seconds, threading.TIMEOUT_MAX))

    # --- questions of the watchdog

    def ask(self, ranks: Collection[int], patience: float) -> dict[int, Any]:
        """Return the statuses of those ranks that answer within `patience` seconds; of others only rank 0."""
        asked = [other for other in ranks if other in self._connections]
        with self._changed:
            for other in asked:
                self._heard.pop(("status", other), None)
        self._send(asked, "ask")

        def answered() -> list[int]:
            return [other for other in asked if ("status", other) in self._heard]

        self._wait(lambda: len(answered()) == len(asked), patience)
        with self._changed:
            return {other: self._heard.pop(("status", other)) for other in answered()}

    def tell_hanging(self, ranks: Collection[int]) -> None:
        """Let the ranks keep their stacks and end."""
        self._send(ranks, "hangs")

    # --- the end

    def end(self) -> None:
        self._over = True
        self._send(list(self._connections), "bye")

    def _listen(self) -> None:
        """Hear all connections, in a thread, until the process ends."""
        with selectors.DefaultSelector() as selector:
            for other, connected in self._connections.items():
                selector.register(connected.socket, selectors.EVENT_READ, other)
            while selector.get_map():
                for event, _ in selector.select():
                    other = event.data
                    try:
                        messages = self._connections[other].take()
                    except OSError:
                        selector.unregister(event.fileobj)
                        self._notice_end(other)
                        continue
                    for message in messages:
                        self._receive(other, message)

    def _receive(self, other: int, message: Message) -> None:
        if message.kind == "ask":
            self._send([other], "status", value=self.status())
        elif message.kind == "hangs":
            self.end_hanging()
        elif message.kind == "death":
            os._exit(1)
        with self._changed:
            if message.kind == "bye":
                self._left.add(other)
            elif message.kind == "status":
                self._heard["status", other] = message.value
            elif message.kind == "value":
                self._heard[message.key, other] = message.value
            self._changed.notify_all()

    def _notice_end(self, other: int) -> None:
        """End this rank after the death of another one, unless that one, or this one, ends in order."""
        if other not in self._left and not self._over:
            threading.Thread(
                target=self._end_after_death, args=(other,), daemon=True
            ).start()

    def _end_after_death(self, other: int) -> None:
        time.sleep(SETTLE_S)
        if self._over:
            return
        if other != 0 or rank() == 1:
            who = self.places.get(other, f"rank {other}")
            terminal.say(
                f"\n{who} has ended: what it or its machine said last tells why; all ranks end\n",
                sys.stderr,
            )
            sys.stderr.flush()
        self._send(list(self._connections), "death")
        os._exit(1)

    # --- the beginning

    def _join(self) -> None:
        """Meet the other ranks. Raises ProblemsError."""
        from torch.distributed import PrefixStore

        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        waiting = f"waiting at {where} for all {world_size()} ranks, up to {TIMEOUT.seconds // 60} minutes"
        notice = threading.Timer(SAY_AFTER_S, terminal.say, (waiting, sys.stderr))
        notice.daemon = True
        if rank() == 0:
            notice.start()
        own = RankPlace(rank(), socket.gethostname(), os.getpid())
        self.places[own.rank] = own
        try:
            store, self._connections = door.connections_of(self._secrets)
        finally:
            notice.cancel()
        threading.Thread(target=self._listen, daemon=True).start()
        for told in self._gather("places", PLACE.dump_python(own), TIMEOUT):
            place = PLACE.validate_python(told)
            self.places[place.rank] = place
        first, attempt = self.from_rank_0(
            (PLACE.dump_python(own), secrets.token_hex(8))
        )
        self.places[0] = PLACE.validate_python(first)
        self.store = PrefixStore(attempt, store)


def sentences(told: list[tuple[str, str | None]]) -> str:
    """Write every different refusal once, with hosts and ranks unless all ranks refuse alike.

    `told`: host and refusal of each rank. A refusal of only rank 0 needs no place.
    """
    refusals: dict[str, list[int]] = {}
    for number, (_, text) in enumerate(told):
        if text is not None:
            refusals.setdefault(text, []).append(number)
    said = []
    for text, ranks in refusals.items():
        hosts = ", ".join(dict.fromkeys(told[number][0] for number in ranks))
        numbers = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        everywhere = len(ranks) == len(told) or (len(refusals) == 1 and ranks == [0])
        if not everywhere:
            text = f"on {hosts} ({numbers}):\n{text}"
        said.append(text)
    return "\n".join(said)


def _refusal_of_rank_0(exchange: int) -> str:
    return f"exchange {exchange}, refusal of rank 0"
