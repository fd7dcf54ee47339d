"""The ends of training before its last step: requests, exceptions, a result, and a watch over figures."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import statistics
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from launch.ranks.ending import STOP_REQUEST
from launch.ranks.processes import rank
from launch.records.facts import Corruption, StepRecord

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
# skipped steps in a row; a loss scale that has not moved in them is stuck
STUCK_STEPS = 20
RECENT = 100  # steps that give the bounds, and from one warning to the next
LEAST = 20  # steps before there are bounds
DEVIATIONS = 40  # median absolute deviations above the median, or the median once more
END_FACTOR = 10.0  # times the first loss, or 1 nat: no training ends above
LAST_STEPS = 10  # whose mean is the last loss
DIVERGED_ADVICE = """Nothing more can be learned from here.
  - metrics.jsonl shows the grad norm before this step: if it grew, lower optimizer.lr, lengthen
    schedule.warmup_steps or set optimizer.clip
  - fp16 overflows where bf16, which needs no loss scale, does not: ds_configs/bf16.json, --set precision=bf16
  - --resume continues from the last checkpoint; if it ends so again at once, move that step-NNNNNN away"""


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


class SkipCounter:
    """Count skipped steps in a row, and end a run that will skip all further ones.

    A static loss scale may overflow for ever, and gradients may never be finite again in bf16. A dynamic loss
    scale comes down, and DeepSpeed itself watches its floor.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.count = 0
        self.scale: float | None = math.nan

    def see(self, outcome: StepRecord) -> None:
        """Count the step. Raises Diverged after STUCK_STEPS skipped steps in a row at one loss scale."""
        same_scale = outcome.loss_scale == self.scale
        self.count = (
            self.count + 1 if outcome.skipped and same_scale else int(outcome.skipped)
        )
        self.scale = outcome.loss_scale
        if self.count < STUCK_STEPS:
            return
        in_a_row = f"{self.count} steps in a row"
        if self.precision != "fp16":
            raise Diverged(
                f"the gradients of {in_a_row} were not finite in {self.precision}"
            )
        scale = self.scale or math.inf
        raise Diverged(
            f"{in_a_row} overflowed and were skipped at loss scale {scale:g}: the scale does not come "
            "down to what fp16 can represent (fp16.loss_scale fixes it; 0 makes it dynamic)"
        )


class FigureBounds:
    """A watch over the loss and the gradient norm of each step, against those of recent steps."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._quiet_until = 0  # step
        self._first = math.inf  # loss of this launch
        self._recent: dict[str, deque[float]] = defaultdict(
            partial(deque, maxlen=RECENT)
        )

    def see(self, record: StepRecord) -> None:
        """Take the figures of a step; say one that is far above, at most once in RECENT steps."""
        if record.skipped:
            return
        if self._first == math.inf and record.loss is not None:
            self._first = record.loss
        self._see_figure("loss", record.loss, record.step)
        self._see_figure("gradient norm", record.grad_norm, record.step)

    def _see_figure(self, name: str, value: float | None, step: int) -> None:
        if value is None:
            return
        recent = self._recent[name]
        if step >= self._quiet_until and is_far_above(value, recent):
            usual = statistics.median(recent)
            self._say(
                f"WARNING: the {name} of step {step} is {value:.4g}, far above the usual {usual:.4g}"
            )
            self._quiet_until = step + RECENT
        recent.append(value)

    def check_end(self) -> None:
        """Compare the last loss with the first. Raises Diverged."""
        last = [self._first, *self._recent["loss"]][-LAST_STEPS:]
        mean = statistics.fmean(last)
        if mean > END_FACTOR * max(self._first, 1.0):
            raise Diverged(
                f"the loss was {self._first:.4g} at first and is {mean:.4g} at the end"
            )


def is_far_above(value: float, recent: Sequence[float]) -> bool:
    """Check a value against a robust bound of those before."""
    if len(recent) < LEAST or value <= max(recent):
        return False
    median = statistics.median(recent)
    deviation = statistics.median(abs(each - median) for each in recent)
    return value > median + max(DEVIATIONS * deviation, median)
