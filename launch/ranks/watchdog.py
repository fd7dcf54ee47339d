"""A watchdog over the ranks of a run: it ends a run that hangs, and names the rank that hangs.

Without it one stopped rank blocks all until a collective times out after half an hour. A thread of every rank
looks at the clock of its own step. An overdue rank asks the others over the watchdog's own sockets, since a
stopped rank serves nothing, such as rank 0's store. The lowest rank that answers judges: the run hangs if a
rank does not answer, or if all are overdue. It keeps all stacks in
the run directory and ends all ranks with `HANGING`; the launcher ends what does not answer.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import json
import os
import secrets
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from launch.console import terminal
from launch.ranks.launch_environment import COLLECTIVES, HANG_REPORT
from launch.ranks.processes import gathered
from recipes.problems import some

HANGING = 4  # exit code
STACKS = "hang-rank-{}.txt"
USUAL_STEPS = 5  # a step may take so many times what steps usually take
LONG = 25  # times run.hang_after, for what is no usual step; of a minute, just under the collectives' 30
ANSWER_S = 10.0  # the most for an answer
REMEMBERED = 20  # steps
SHOWN_FRAMES = 8  # the innermost of a rank's stack, in the report; STACKS have all
SHOWN_RANKS = 8  # names in a row


class Phase(enum.Enum):
    """The activity of a rank, in the order of a step."""

    STARTING = "starting"
    DATA = "waiting for its data"
    COMPUTING = "computing"
    COMPUTED = "done with its step, waiting for the others"
    RECORDING = "at the files of the run"
    VALIDATING = "validating"
    SAVING = "saving a checkpoint"


@dataclass(frozen=True)
class Place:
    """The address of a rank's watchdog."""

    rank: int
    host: str
    pid: int
    address: str
    port: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Status:
    """A rank's answer. `stack`: of its main thread; `seconds`: in this phase, or since its last pass."""

    rank: int
    step: int
    phase: Phase
    passes: int  # forward passes of this step
    seconds: float
    overdue: bool
    stack: tuple[str, ...]

    @property
    def progress(self) -> tuple[int, int, int]:
        return self.step, [*Phase].index(self.phase), self.passes

    def to_json(self) -> bytes:
        return json.dumps({**vars(self), "phase": self.phase.name}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Status:
        values = json.loads(text)
        return cls(**{**values, "phase": Phase[values["phase"]], "stack": tuple(values["stack"])})

    def __str__(self) -> str:
        passes = f" (forward passes: {self.passes})" if self.phase is Phase.COMPUTING else ""
        return f"step {self.step}, {self.phase.value}{passes} for {self.seconds:.0f} s"


class Watchdog:
    """This rank's activity, with the threads that watch it and answer other ranks.

    The loop calls `enter` and `advance`. The other ranks' watchdogs ask through `places`.
    """

    def __init__(self, directory: Path | None, hang_after: float) -> None:
        """Take `hang_after` in seconds (run.hang_after); `directory`: of the run; None: nothing is kept."""
        self.places: Sequence[Place] = ()
        self._directory, self._hang_after = directory, hang_after
        self._patience = min(ANSWER_S, hang_after / 4)  # seconds for an answer
        self._rank, self._token = 0, b""
        self._step, self._phase, self._since, self._passes = 0, Phase.STARTING, time.monotonic(), 0
        self._began = self._since  # of the step
        self._usual: deque[float] = deque(maxlen=REMEMBERED)
        self._ended = threading.Event()

    # --- what the loop tells

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Begin a phase; with `step`, of that step."""
        now = time.monotonic()
        if phase is Phase.COMPUTING:
            self._began = now
        if self._phase is Phase.COMPUTED and self._step > 1:  # the first step of a launch compiles
            self._usual.append(now - self._began)
        if step is not None:
            self._step, self._passes = step, 0
        self._phase, self._since = phase, now

    @contextlib.contextmanager
    def aside(self, phase: Phase) -> Iterator[None]:
        """Be in another phase during the block, then go on with the one before."""
        before, self._phase, self._since = self._phase, phase, time.monotonic()
        try:
            yield
        finally:
            self._phase, self._since = before, time.monotonic()

    def advance(self) -> None:
        """Count a forward pass."""
        self._passes += 1
        if self._phase is Phase.VALIDATING:  # which may be long
            self._since = time.monotonic()

    # --- what the others ask

    def status(self) -> Status:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        seconds = time.monotonic() - self._since
        stack = tuple(traceback.format_stack(main, SHOWN_FRAMES)) if main else ()
        overdue = seconds > self.limit()
        return Status(self._rank, self._step, self._phase, self._passes, seconds, overdue, stack)

    def limit(self) -> float:
        """Return the seconds that the current phase may take."""
        if self._phase in (Phase.COMPUTING, Phase.COMPUTED) and self._usual:
            return max(self._hang_after, USUAL_STEPS * statistics.median(self._usual))
        return LONG * self._hang_after

    # --- threads

    @contextlib.contextmanager
    def running(self, group: dist.ProcessGroup, say: Callable[[str], None]) -> Iterator[Watchdog]:
        """Watch in the block. Nothing is watched with hang_after 0, or in a run of one. Collective.

        `say` prints that the ranks cannot reach each other, and so do not watch.
        """
        if not self._hang_after or dist.get_world_size(group) == 1:
            yield self
            return
        self._rank = dist.get_rank(group)
        server = socket.create_server(("", 0), backlog=dist.get_world_size(group))
        try:
            host, port = socket.gethostname(), server.getsockname()[1]
            own = Place(self._rank, host, os.getpid(), _own_address(self._rank), port)
            told = gathered((own, secrets.token_hex(16)), group)
            self.places, self._token = [place for place, _ in told], told[0][1].encode()
            threading.Thread(target=self._answer, args=(server,), daemon=True).start()
            neighbour = self.places[(self._rank + 1) % len(self.places)]
            answer = self._ask(neighbour)
            silences = gathered(f"{neighbour} {answer}" if isinstance(answer, str) else "", group)
            if any(silences):
                say(f"no watchdog, a hanging rank will be noticed late: {next(filter(None, silences))}")
            else:
                threading.Thread(target=self._watch, daemon=True).start()
            yield self
        finally:
            self._ended.set()
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # or its thread would wait on
            server.close()

    def _answer(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed: the run is over
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(ANSWER_S)
                token, _, wish = connection.makefile("rb").readline(200).strip().partition(b" ")
                if not secrets.compare_digest(token, self._token):
                    continue
                if wish == b"end":
                    self._keep_stacks()
                connection.sendall(self.status().to_json())
                connection.shutdown(socket.SHUT_RDWR)
                if wish == b"end":
                    os._exit(HANGING)

    def _watch(self) -> None:
        tick, looked = min(5.0, self._hang_after / 10), time.monotonic()
        while not self._ended.wait(tick):
            asleep = time.monotonic() - looked - tick
            if asleep > 2 * tick:  # this process itself was stopped, and its clock was not
                self._since += asleep
                self._began += asleep
            # A silent rank is asked twice: its silence is sure when the phase is overdue.
            if self.limit() - 2 * self._patience < time.monotonic() - self._since:
                silent = self._silent_below()
                if len(silent) == self._rank:
                    self._judge(silent)
            looked = time.monotonic()

    def _silent_below(self) -> dict[int, str]:
        """Return the silence of the ranks below the first that answers, which then judges."""
        silent = dict[int, str]()
        for place in self.places[: self._rank]:
            if not isinstance(answer := self._ask(place), str):
                break
            silent[place.rank] = answer
        return silent

    def _judge(self, silent: dict[int, str]) -> None:
        """End the run if it hangs. `silent`: ranks that have not answered."""
        others = [place for place in self.places if place.rank != self._rank]
        statuses, more = self._ask_all([place for place in others if place.rank not in silent])
        if silent := silent | more:
            answers, silent = self._ask_all([self.places[rank] for rank in silent])
            statuses |= answers
        statuses[self._rank] = self.status()
        if self._ended.is_set() or not (silent or all(status.overdue for status in statuses.values())):
            return
        text = "\n".join([*self._sentences(statuses, silent), *_stacks(statuses), self._advice()])
        if self._directory is not None:
            with contextlib.suppress(OSError):
                (self._directory / HANG_REPORT).write_text(text + "\n")
        self._keep_stacks()
        terminal.say(f"\n{text}\n", sys.stderr)
        sys.stderr.flush()
        self._ask_all([place for place in others if place.rank not in silent], b"end")
        os._exit(HANGING)

    def _ask_all(
        self, places: Sequence[Place], wish: bytes = b"status"
    ) -> tuple[dict[int, Status], dict[int, str]]:
        """Return answers by rank, and the forms of silence by rank."""
        with ThreadPoolExecutor(min(len(places), 64) or 1) as pool:
            answers = list(zip(places, pool.map(lambda place: self._ask(place, wish), places), strict=True))
        statuses = {place.rank: answer for place, answer in answers if isinstance(answer, Status)}
        return statuses, {place.rank: answer for place, answer in answers if isinstance(answer, str)}

    def _ask(self, place: Place, wish: bytes = b"status") -> Status | str:
        """Return a rank's answer, or the form of its silence."""
        try:
            with socket.create_connection((place.address, place.port), self._patience) as connection:
                connection.sendall(self._token + b" " + wish + b"\n")
                return Status.from_json(connection.makefile("rb").read())
        except TimeoutError:
            return "does not answer: its process is stopped, or its machine or network is down"
        except OSError as error:
            return f"has ended, or cannot be reached ({error.strerror or error})"
        except ValueError:
            return "ended while it answered"

    def _keep_stacks(self) -> None:
        """Write all threads' stacks, and this rank's last collectives, into the run directory."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError), open(self._directory / STACKS.format(self._rank), "w") as file:
            faulthandler.dump_traceback(file)
        c10d = torch._C._distributed_c10d
        dump = getattr(c10d, "_dump_nccl_trace", getattr(c10d, "_dump_fr_trace", bytes))
        with contextlib.suppress(OSError):
            (self._directory / f"{COLLECTIVES}{self._rank}").write_bytes(dump())

    # --- what is printed

    def _sentences(self, statuses: Mapping[int, Status], silent: Mapping[int, str]) -> list[str]:
        own = statuses[self._rank]
        usual = f"; a step usually takes {statistics.median(self._usual):.2g} s" if self._usual else ""
        where = "" if self._directory is None else f" in step {own.step}"  # without one, ranks run ahead
        first = f"the run hangs{where} and is ended: {own.seconds:.0f} s without progress"
        lines = [f"{first} (run.hang_after={self._hang_after:g}{usual})"]
        lines += [f"  {self.places[rank]} {how}" for rank, how in sorted(silent.items())]
        if not silent:
            least = min(status.progress for status in statuses.values())
            behind = [rank for rank, status in sorted(statuses.items()) if status.progress == least]
            if len(behind) < len(statuses):
                lines += [f"  {self.places[rank]} is behind the others" for rank in behind[:SHOWN_RANKS]]
            else:
                lines.append("  all ranks answer, and none is behind the others")
        return lines

    def _advice(self) -> str:
        if self._directory is None:
            return "Nothing was kept: the same command begins anew"
        stacks = f"All threads' stacks are in {self._directory}: {HANG_REPORT} and {STACKS.format('N')}"
        stacks += f"; the last collectives in {COLLECTIVES}N"
        return f"{stacks}. Nothing was saved: --resume continues from the newest complete checkpoint"


def _stacks(statuses: Mapping[int, Status]) -> Iterator[str]:
    """Yield the ranks' stacks; ranks with equal stacks together."""
    alike: dict[tuple[object, ...], list[Status]] = {}
    for _, status in sorted(statuses.items()):
        alike.setdefault((status.step, status.phase, status.stack), []).append(status)
    for first, *others in alike.values():
        ranks = some([str(status.rank) for status in (first, *others)], SHOWN_RANKS)
        yield f"rank{'s' if others else ''} {ranks}: {first}; stack, innermost last:"
        yield "".join(first.stack).rstrip()


def _own_address(rank: int) -> str:
    """Return the address at which others reach this rank: rank 0's from the launcher."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if rank == 0:
        return master
    place = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(place[0], socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        probe.connect(place[4])
        return str(probe.getsockname()[0])
