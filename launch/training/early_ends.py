"""The ends of training before its last step, as exceptions and as a result."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.records.facts import Corruption, StepRecord

MOST_NAMED = 3  # tensors of one rank
KINDS = {"weight": "weights in full precision of", "rounded": "rounded weights of", "batch": "the batch"}
STUCK_STEPS = 20  # skipped steps in a row; a loss scale that has not moved in them is stuck

DIVERGED_ADVICE = """Nothing more can be learned from here.
  - metrics.jsonl shows the grad norm before this step: if it grew, lower optimizer.lr, lengthen
    schedule.warmup_steps or set optimizer.clip
  - fp16 overflows where bf16, which needs no loss scale, does not: ds_configs/bf16.json, --set precision=bf16
  - --resume continues from the last checkpoint; if it ends so again at once, move that step-NNNNNN away"""


class EarlyEnd(Exception):
    """An early end of training on all ranks alike; the message gives the reason `why` and the fix.

    `status`: of the result; `code`: exit code of the processes.
    """

    status, code = "interrupted", 1

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Diverged(EarlyEnd):
    """An end because further steps would be noise: the loss is not finite, or the scale is stuck."""

    status, code = "diverged", 3

    def __str__(self) -> str:
        return f"{self.why}. {DIVERGED_ADVICE}"


class Corrupted(EarlyEnd):
    """An end because numbers changed by themselves: between two steps, or on one of several copies.

    `sound`: the last step after which a check found nothing; `step`: that of the finding.
    """

    status, code = "corrupted", 5

    def __init__(self, found: tuple[Corruption, ...], sound: int, step: int) -> None:
        self.found, self.sound, self.step = found, sound, step
        named = "; ".join(map(described, found))
        super().__init__(f"numbers changed by themselves in steps {sound} to {step}: {named}")

    def __str__(self) -> str:
        cause = "memory or processor of that machine is at fault (its kernel's log may say more)"
        if all(each.among_copies for each in self.found):
            cause += ", or code by which ranks compute the same numbers in different ways"
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
        fix = "make room, or keep fewer (--set run.keep_checkpoints=2), and resume with --resume"
        return f"the last checkpoint could not be written: {self.why}; {fix}"


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
        self.count = self.count + 1 if outcome.skipped and same_scale else int(outcome.skipped)
        self.scale = outcome.loss_scale
        if self.count < STUCK_STEPS:
            return
        in_a_row = f"{self.count} steps in a row"
        if self.precision != "fp16":
            raise Diverged(f"the gradients of {in_a_row} were not finite in {self.precision}")
        scale = self.scale or math.inf
        raise Diverged(
            f"{in_a_row} overflowed and were skipped at loss scale {scale:g}: the scale does not come "
            "down to what fp16 can represent (fp16.loss_scale fixes it; 0 makes it dynamic)"
        )
