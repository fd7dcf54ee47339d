"""A watchdog over the ranks of a run: it ends a run that hangs, and names the rank that hangs.

Without it one stopped rank blocks all until a collective times out after half an hour. A thread of every rank
looks at the clock of its own step. If rank 0 is overdue, it asks all others over the connections of the
meeting: the run hangs if a rank does not answer, or if all are overdue. Another rank that is overdue asks
rank 0, which may itself be the one that is stopped. Every rank keeps its stacks in the run directory and ends
with `HANGING`; the launcher ends what does not answer.
"""

from __future__ import annotations

import contextlib
import enum
import faulthandler
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import TypeAdapter

from launch.console import terminal
from launch.ranks.ending import HANG_REPORT
from launch.ranks.meeting import Meeting
from launch.ranks.processes import rank, world_size
from recipes.problems import some

if TYPE_CHECKING:
    from launch.ranks.ranks_meeting import RanksMeeting

HANGING = 4  # exit code
STACKS = "hang-rank-{}.txt"
USUAL_STEPS = 5  # a step may take so many times what steps usually take
# times run.hang_after, for what is no usual step; of a minute, just under the collectives' 30
LONG = 25
ANSWER_S = 10.0  # the most for an answer
REMEMBERED = 20  # steps
KEEP_S = 2.0  # that others have to begin their files of stacks
SILENCE = "does not answer: its process is stopped, or its machine or network is down"
# torch's files whose functions run only while it compiles, also a backward pass.
COMPILING = ("torch/_dynamo/convert_frame.py", "torch/_inductor/graph.py")
SHOWN_FRAMES = 8  # the innermost of a rank's stack, in the report; STACKS have all
SHOWN_RANKS = 8  # names in a row
COLLECTIVES = "hang-collectives-rank-"  # in the run directory, with the rank behind it
# torch's Flight Recorder keeps NCCL's last collectives, and writes them where one times out. By their newer
# names (torch 2.11 and 2.13 read both), with the older ones, which stand for the user's wish.
FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "TORCH_NCCL_DUMP_ON_TIMEOUT",
}


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

    def __str__(self) -> str:
        passes = (
            f" (forward passes: {self.passes})" if self.phase is Phase.COMPUTING else ""
        )
        return f"step {self.step}, {self.phase.value}{passes} for {self.seconds:.0f} s"


STATUS = TypeAdapter(Status)


class Watchdog:
    """This rank's activity, with the thread that watches it.

    The loop calls `enter` and `advance`.
    """

    def __init__(
        self, directory: Path, hang_after: float, meeting: Meeting | None = None
    ) -> None:
        """Take `hang_after` in seconds (run.hang_after); 0: nothing is watched.

        `directory`: of the run. `meeting`: of all ranks; None: of one.
        """
        self._directory = directory
        self._hang_after = hang_after
        self._patience = min(ANSWER_S, hang_after / 4)  # seconds for an answer
        self._tick = min(5.0, hang_after / 10)  # seconds between looks
        # it is asked for ranks only where it knows of places
        self._meeting = cast("RanksMeeting", meeting or Meeting())
        self._rank = rank()
        self._step = 0
        self._passes = 0
        self._phase = Phase.STARTING
        self._since = time.monotonic()
        self._began = self._since  # of the step
        self._usual: deque[float] = deque(maxlen=REMEMBERED)
        self._ended = threading.Event()

    # --- what the loop tells

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Begin a phase; with `step`, of that step."""
        now = time.monotonic()
        if phase is Phase.COMPUTING:
            self._began = now
        # the first step of a launch compiles
        if self._phase is Phase.COMPUTED and self._step > 1:
            self._usual.append(now - self._began)
        if step is not None:
            self._step = step
            self._passes = 0
        self._phase = phase
        self._since = now

    @contextlib.contextmanager
    def aside(self, phase: Phase) -> Iterator[None]:
        """Be in another phase during the block, then go on with the one before."""
        before = self._phase
        self._phase = phase
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._phase = before
            self._since = time.monotonic()

    def advance(self) -> None:
        """Count a forward pass."""
        self._passes += 1
        if self._phase is Phase.VALIDATING:  # which may be long
            self._since = time.monotonic()

    # --- the answer to others

    def status(self) -> Status:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        seconds = time.monotonic() - self._since
        stack = tuple(traceback.format_stack(main, SHOWN_FRAMES)) if main else ()
        overdue = seconds > self.limit()
        return Status(
            self._rank, self._step, self._phase, self._passes, seconds, overdue, stack
        )

    def limit(self) -> float:
        """Return the seconds that the current phase may take; a step that compiles is no usual one."""
        if (
            self._phase in (Phase.COMPUTING, Phase.COMPUTED)
            and self._usual
            and not compiles()
        ):
            return max(self._hang_after, USUAL_STEPS * statistics.median(self._usual))
        return LONG * self._hang_after

    # --- the thread

    @contextlib.contextmanager
    def running(self) -> Iterator[Watchdog]:
        """Watch in the block, if there are several ranks."""
        if not self._hang_after or not self._meeting.places:
            yield self
            return
        self._meeting.status = lambda: STATUS.dump_python(self.status(), mode="json")
        self._meeting.end_hanging = self._end
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            yield self
        finally:
            self._ended.set()

    def _watch(self) -> None:
        tick = self._tick
        looked = time.monotonic()
        while not self._ended.wait(tick):
            asleep = time.monotonic() - looked - tick
            # this process itself was stopped, and its clock was not
            if asleep > 2 * tick:
                self._since += asleep
                self._began += asleep
            # A silent rank is asked twice: its silence is sure when the phase is overdue.
            if self.limit() - 2 * self._patience < time.monotonic() - self._since:
                self._judge()
            looked = time.monotonic()

    def _judge(self) -> None:
        """End the run if it hangs: rank 0 asks all others, another rank asks rank 0."""
        others = {*range(world_size())} - {0} if self._rank == 0 else {0}
        statuses = self._ask(others)
        statuses |= self._ask(others - statuses.keys())
        silent = others - statuses.keys()
        statuses[self._rank] = self.status()
        all_overdue = self._rank == 0 and all(
            status.overdue for status in statuses.values()
        )
        if self._ended.is_set() or not (silent or all_overdue):
            return
        self._report(
            "\n".join(
                [*self._sentences(statuses, silent), *_stacks(statuses), self._advice()]
            )
        )
        self._meeting.tell_hanging(others - silent)
        self._keep_stacks()
        self._await_stacks(others - silent)
        # the others find rank 0 silent by themselves, and a launcher ends them after this one
        if self._rank:
            time.sleep(3 * self._tick)
        os._exit(HANGING)

    def _ask(self, ranks: Collection[int]) -> dict[int, Status]:
        answers: dict[int, Any] = (
            self._meeting.ask(ranks, self._patience) if ranks else {}
        )
        return {
            other: STATUS.validate_python(answer) for other, answer in answers.items()
        }

    def _report(self, text: str) -> None:
        """Keep and print the report of a hang: rank 0's, or that of the first rank that finds it silent."""
        try:
            with open(self._directory / HANG_REPORT, "x") as file:
                file.write(f"{text}\n")
        except FileExistsError:
            return
        except OSError:  # it is printed all the same
            pass
        terminal.say(f"\n{text}\n", sys.stderr)
        sys.stderr.flush()

    def _end(self) -> None:
        """Keep this rank's stacks and end it."""
        self._keep_stacks()
        os._exit(HANGING)

    def _keep_stacks(self) -> None:
        """Write all threads' stacks, and this rank's last collectives, into the run directory."""
        with (
            contextlib.suppress(OSError),
            open(self._directory / STACKS.format(self._rank), "w") as file,
        ):
            faulthandler.dump_traceback(file)
        c10d = torch._C._distributed_c10d
        dump = getattr(c10d, "_dump_nccl_trace", getattr(c10d, "_dump_fr_trace", bytes))
        with contextlib.suppress(OSError):
            (self._directory / f"{COLLECTIVES}{self._rank}").write_bytes(dump())

    def _await_stacks(self, ranks: Collection[int]) -> None:
        """Wait until these ranks have begun their files: a launcher ends them after this one."""
        files = [self._directory / STACKS.format(rank) for rank in ranks]
        until = time.monotonic() + KEEP_S
        while time.monotonic() < until and not all(file.exists() for file in files):
            time.sleep(self._tick / 10)

    # --- what is printed

    def _sentences(
        self, statuses: Mapping[int, Status], silent: Collection[int]
    ) -> list[str]:
        own = statuses[self._rank]
        usual = (
            f"; a step usually takes {statistics.median(self._usual):.2g} s"
            if self._usual
            else ""
        )
        first = f"the run hangs in step {own.step} and is ended: {own.seconds:.0f} s without progress"
        lines = [f"{first} (run.hang_after={self._hang_after:g}{usual})"]
        places = self._meeting.places
        lines += [f"  {places[other]} {SILENCE}" for other in sorted(silent)]
        if not silent:
            least = min(status.progress for status in statuses.values())
            behind = [
                other
                for other, status in sorted(statuses.items())
                if status.progress == least
            ]
            if len(behind) < len(statuses):
                lines += [
                    f"  {places[other]} is behind the others"
                    for other in behind[:SHOWN_RANKS]
                ]
            else:
                lines.append("  all ranks answer, and none is behind the others")
        return lines

    def _advice(self) -> str:
        stacks = f"All threads' stacks are in {self._directory}: {HANG_REPORT} and {STACKS.format('N')}"
        stacks += f"; the last collectives in {COLLECTIVES}N"
        return f"{stacks}. Nothing was saved: --resume continues from the newest complete checkpoint"


def flight_recorder(environ: Mapping[str, str], directory: Path) -> dict[str, str]:
    """Return variables that switch torch's Flight Recorder on, without those that the user has set."""
    values = zip(
        FLIGHT_RECORDER.items(),
        ("2000", str(directory.absolute() / COLLECTIVES), "1"),
        strict=True,
    )
    return {
        name: value for (name, older), value in values if not {name, older} & {*environ}
    }


def compiles() -> bool:
    """Check whether torch.compile is at work in a thread of this process."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_filename.endswith(COMPILING):
                return True
            frame = frame.f_back
    return False


def _stacks(statuses: Mapping[int, Status]) -> Iterator[str]:
    """Yield the ranks' stacks; ranks with equal stacks together."""
    alike: dict[tuple[object, ...], list[Status]] = {}
    for _, status in sorted(statuses.items()):
        alike.setdefault((status.step, status.phase, status.stack), []).append(status)
    for first, *others in alike.values():
        ranks = some([str(status.rank) for status in (first, *others)], SHOWN_RANKS)
        yield f"rank{'s' if others else ''} {ranks}: {first}; stack, innermost last:"
        yield "".join(first.stack).rstrip()
