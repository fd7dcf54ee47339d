"""A meeting of all ranks before they form a process group: what one refuses ends them all.

Without it a rank that refuses ends alone, and those of other machines wait for it for half an hour.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from launch.console import terminal
from launch.ranks import ending
from launch.ranks.lifeline import Lifeline
from launch.ranks.processes import TIMEOUT, port_is_taken, rank, world_size
from recipes.problems import Problem, ProblemsError

T = TypeVar("T")
SAY_AFTER_S = 20.0  # that others are awaited
POLL_S = 0.2  # between looks for what rank 0 makes
PART_BYTES = 4 << 20  # of what is handed on: a store takes 8 MB at once
LEAVE_S = 5.0  # rank 0, which may serve the store, waits so long for others to read why all end


class Meeting:
    """All ranks at the launcher's address, from the first `settle` on; a plain `python` meets nobody.

    `store`: where they met, for the process group; None before, and for one process.
    """

    def __init__(self) -> None:
        self.store: Any = None
        self._rounds = self._handed = 0
        self._lifeline: Lifeline | None = None

    def end(self) -> None:
        """Let ranks end by themselves: they are done, or all of them refuse."""
        if self._lifeline:
            self._lifeline.end()

    def settle(self, check: Callable[[], T], patience: timedelta = TIMEOUT) -> T:
        """What `check` returns on this rank, once it has returned on all of them. Collective.

        Where it raises ValueError on any, rank 0 says each different message once, and all ranks end with
        exit code 2. `patience`: that ranks have for the slowest.
        """
        if world_size() == 1:
            try:
                return check()
            except ValueError as e:
                ending.refuse(e)
        refusal, failure = None, None
        try:
            value = check()
        except ValueError as e:
            refusal = str(e)
        except Exception as e:
            refusal, failure = repr(e), e
        heard = self._hear_all(refusal, patience)
        if failure:
            raise failure
        if heard:
            raise SystemExit(2)
        return value

    def once(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, which alone runs it; within a check of `settle`. Collective.

        It travels as a pickle. Raises ValueError on all ranks where `make` does, or rank 0 before it.
        """
        if world_size() == 1:
            return make()
        self._handed += 1
        key = f"handed-{self._handed}"
        if rank() == 0:
            value = make()
            sent = pickle.dumps(value)
            parts = [sent[at : at + PART_BYTES] for at in range(0, len(sent), PART_BYTES)]
            for number, part in enumerate(parts):
                self.store.set(f"{key}/{number}", part)
            self.store.set(key, str(len(parts)))
            return value
        verdict = f"round-{self._rounds + 1}/0"  # of the `settle` that this is a part of
        while not self.store.check([key]):
            if self.store.check([verdict]) and not self.store.check([key]):
                raise ValueError(json.loads(self.store.get(verdict))[1])
            time.sleep(POLL_S)
        received = b"".join(self.store.get(f"{key}/{n}") for n in range(int(self.store.get(key))))
        handed: T = pickle.loads(received)
        return handed

    def from_rank_0(self, value: T) -> T:
        """Return rank 0's `value`, in JSON's types. Collective."""
        if world_size() == 1:
            return value
        key = self._round()
        if rank() == 0:
            self.store.set(key, json.dumps(value))
        heard: T = json.loads(self.store.get(key))
        return heard

    def to_rank_0(self, value: T) -> list[T]:
        """Gather every rank's `value`, in JSON's types, on rank 0; others get their own. Collective."""
        if world_size() == 1:
            return [value]
        key = self._round()
        if rank() != 0:
            self.store.set(f"{key}/{rank()}", json.dumps(value))
            return [value]
        return [value, *(json.loads(self.store.get(f"{key}/{other}")) for other in range(1, world_size()))]

    def compare(self, own: T, judge: Callable[[list[T]], None]) -> None:
        """Let rank 0 `judge` the values of all ranks; if it refuses, all ranks end. Collective.

        `own` has JSON's types; `judge` gets a list in the order of ranks, and raises ValueError.
        """
        everyone = self.to_rank_0(own)
        self.settle(lambda: judge(everyone) if rank() == 0 else None)

    def _hear_all(self, own: str | None, patience: timedelta) -> bool:
        """Exchange refusals; return whether there is one, which rank 0 has printed."""
        key = self._round()
        self.store.set_timeout(patience)
        self.store.set(f"{key}/{rank()}", json.dumps((socket.gethostname(), own)))
        if rank() != 0:
            refused = bool(json.loads(self.store.get(f"{key}/refused")))
            if refused:
                self.end()
                with contextlib.suppress(RuntimeError):  # rank 0 has left
                    self.store.add(f"{key}/left", 1)
            return refused
        told = [(socket.gethostname(), own)]
        told += [json.loads(self.store.get(f"{key}/{other}")) for other in range(1, world_size())]
        if text := sentences(told):
            terminal.say(f"\n{text}\n", sys.stderr)
            self.end()
        self.store.set(f"{key}/refused", json.dumps(bool(text)))
        deadline = time.monotonic() + LEAVE_S
        while text and self.store.add(f"{key}/left", 0) < world_size() - 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        return bool(text)

    def _round(self) -> str:
        if self.store is None:
            self.store = _join()
            self._lifeline = Lifeline(self.store, rank(), world_size())
        self._rounds += 1
        return f"round-{self._rounds}"


def sentences(told: list[tuple[str, str | None]]) -> str:
    """Write every different refusal once, with hosts and ranks unless all ranks refuse alike.

    `told`: host and refusal of each rank. A refusal of rank 0 alone needs no place.
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
        said.append(text if everywhere else f"on {hosts} ({numbers}):\n{text}")
    return "\n".join(said)


def _join() -> Any:
    import torch.distributed as dist

    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    waiting = f"waiting at {where} for all {world_size()} ranks, up to {TIMEOUT.seconds // 60} minutes"
    notice = threading.Timer(SAY_AFTER_S, terminal.say, (waiting, sys.stderr))
    notice.daemon = True
    if rank() == 0:
        notice.start()
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=TIMEOUT))
        return dist.PrefixStore(_attempt(store), store)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise port_is_taken(os.environ["MASTER_PORT"]) from None
        came = f"rank {rank()} on {socket.gethostname()} met no other rank at {where}"
        rule = str(error).splitlines()[0]
        fix = "check that every machine was started, and reaches that address"
        raise ProblemsError([Problem("MASTER_ADDR", came, rule, fix)]) from None
    finally:
        notice.cancel()


def _attempt(store: Any) -> str:
    """Agree on a name among the ranks that are alive now.

    torchrun restarts ranks (--max_restarts) at the store of the killed ones, whose addresses and refusals are
    still in there. Each rank says hello with a word of its own; rank 0 repeats what it hears until every rank
    has found its own word in it.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + TIMEOUT.total_seconds()
    store.set(f"hello/{rank()}", own)
    others = range(1, world_size())
    while time.monotonic() < deadline:
        if rank() == 0:
            words = [own, *(store.get(f"hello/{other}").decode() for other in others)]
            store.set("heard", json.dumps(words))
            if store.check([f"{own}/here/{other}" for other in others]):
                return own
        else:
            words = json.loads(store.get("heard"))
            if words[rank()] == own:
                store.set(f"{words[0]}/here/{rank()}", "")
                return str(words[0])
        time.sleep(0.05)
    raise RuntimeError("some ranks did not come")
