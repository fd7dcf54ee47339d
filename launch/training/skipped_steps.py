"""A watch over skipped steps."""

from __future__ import annotations

import math

from launch.records.facts import StepRecord
from launch.training.early_ends import Diverged
from launch.training.run import TrainingRun

# skipped steps in a row; a loss scale that has not moved in them is stuck
STUCK_STEPS = 20


class SkipCounter:
    """Count skipped steps in a row, and end a run that will skip all further ones.

    A static loss scale may overflow for ever, and gradients may never be finite again in bf16. A dynamic loss
    scale comes down, and DeepSpeed itself watches its floor.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._precision = run.job.plan.precision
        self._count = 0
        self._scale: float | None = math.nan

    def end(self, error: BaseException | None) -> None: ...

    def after_step(self, record: StepRecord) -> None:
        """Count the step. Raises Diverged after STUCK_STEPS skipped steps in a row at one loss scale."""
        same_scale = record.loss_scale == self._scale
        self._count = (
            self._count + 1 if record.skipped and same_scale else int(record.skipped)
        )
        self._scale = record.loss_scale
        if self._count < STUCK_STEPS:
            return
        in_a_row = f"{self._count} steps in a row"
        if self._precision != "fp16":
            raise Diverged(
                f"the gradients of {in_a_row} were not finite in {self._precision}"
            )
        scale = self._scale or math.inf
        raise Diverged(
            f"{in_a_row} overflowed and were skipped at loss scale {scale:g}: the scale does not come "
            "down to what fp16 can represent (fp16.loss_scale fixes it; 0 makes it dynamic)"
        )
