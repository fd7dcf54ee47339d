"""The ends of training before its last step: requests, exceptions and a result."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from launch.ranks.ending import STOP_REQUEST
from launch.ranks.processes import rank
from launch.records.facts import Corruption

# Launchers act on SIGUSR1, SIGUSR2 and SIGXCPU nowhere. SIGHUP: the terminal is gone.
SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
    signal.SIGHUP,
)
STOP_FILE = "STOP file"
REASONS = ("", *(number.name for number in SIGNALS), STOP_FILE)  # the last one wins
MOST_NAMED = 3  # tensors of one rank
KINDS = {
    "weight": "weights in full precision of",
    "rounded": "rounded weights of",
    "batch": "the batch",
}
DIVERGED_ADVICE = """Nothing more can be learned from here.
  - metrics.jsonl shows the grad norm before this step: if it grew, lower optimizer.lr, lengthen
    schedule.warmup_steps or set optimizer.clip
  - in fp16: it overflows where bf16, which needs no loss scale, does not (--set precision=bf16)
  - --resume continues from the last checkpoint, if one was saved; if it ends so again at once, move that
    step-NNNNNN away; --branch RUN@STEP goes on from an earlier one with another rate"""


class StopRequest:
    """A request for an orderly stop after the current step, by signal or by `stop_file`.

    After an error signals are still only noted: this process writes its results and ends, and a launcher that
    ends it because another rank failed must not be quicker.
    """

    def __init__(self, stop_file: Path) -> None:
        self.reason = ""  # of REASONS
        self._stop_file = stop_file
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if (
                    number == signal.SIGHUP
                    and signal.getsignal(number) == signal.SIG_IGN
                ):
                    continue  # nohup
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            setattr(error, STOP_REQUEST, self)
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name

    def look(self) -> str:
        """Return the reason to stop, of REASONS. Rank 0 looks for the file and removes it."""
        # False where a file system does not answer
        if rank() == 0 and os.path.exists(self._stop_file):
            # a directory, or another user's: a resumed run says so
            with contextlib.suppress(OSError):
                self._stop_file.unlink()  # so that a resumed run does not stop at once
            self.reason = STOP_FILE
        return self.reason


@contextlib.contextmanager
def stacks_at_quit(path: Path) -> Iterator[None]:
    """Have SIGQUIT, which ends this process, leave the stacks of all threads in `path`."""
    with open(path, "w") as file:
        faulthandler.register(signal.SIGQUIT, file, chain=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGQUIT)
            with contextlib.suppress(OSError):
                path.unlink()


class EarlyEnd(Exception):
    """An early end of training on all ranks alike; the message gives the reason `why` and the fix.

    `status`: of the result; `code`: exit code of the processes.
    """

    status = "interrupted"
    code = 1

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Diverged(EarlyEnd):
    """An end because further steps would be noise: the loss is not finite, or the scale is stuck."""

    status = "diverged"
    code = 3

    def __str__(self) -> str:
        return f"{self.why}. {DIVERGED_ADVICE}"


class Corrupted(EarlyEnd):
    """An end because numbers changed by themselves: between two steps, or on one of several copies.

    `sound`: the last step after which a check found nothing; `step`: that of the finding.
    """

    status = "corrupted"
    code = 5

    def __init__(self, found: tuple[Corruption, ...], sound: int, step: int) -> None:
        self.found = found
        self.sound = sound
        self.step = step
        named = "; ".join(map(described, found))
        super().__init__(
            f"numbers changed by themselves in steps {sound} to {step}: {named}"
        )

    def __str__(self) -> str:
        cause = "memory or processor of that machine is at fault (its kernel's log may say more)"
        if all(each.among_copies for each in self.found):
            cause += (
                ", or code by which ranks compute the same numbers in different ways"
            )
        return f"{self.why}\n{cause}: --resume goes on from the last sound checkpoint, best without it"


def described(found: Corruption) -> str:
    """Name the rank and its first tensors."""
    names = ", ".join(found.tensors[:MOST_NAMED])
    more = ", ..." if len(found.tensors) > MOST_NAMED else ""
    copies = ", unlike other ranks' copies" if found.among_copies else ""
    kind = KINDS.get(found.kind, f"optimizer state {found.kind} of")
    return f"rank {found.rank} on {found.host}: {kind} {names}{more}{copies}"


class BrokenData(EarlyEnd):
    """An end because some rank cannot read the next step's data. `advice`: the saved step, and the fix."""

    advice = ""

    def __str__(self) -> str:
        return f"{self.why}\n{self.advice}".rstrip()


class NotSavedError(EarlyEnd):
    """An end without the last checkpoint, which could not be written."""

    status = "not saved"

    def __str__(self) -> str:
        return f"the last checkpoint could not be written: {self.why}; then resume with --resume"


@dataclass(frozen=True)
class EarlyStop:
    """An early stop on request. `request`: the signal or file that asked for it."""

    request: str
    step: int  # completed optimizer steps
    steps: int  # of the whole run

    def __str__(self) -> str:
        return f"{self.request}: stopped after step {self.step} of {self.steps}, checkpoint saved"
