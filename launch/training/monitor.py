"""DeepSpeed's monitor (TensorBoard, W&B, Comet, CSV), which has the learning rate alone by itself."""

from __future__ import annotations

import sys

from launch.records.facts import StepRecord, Validation, finite
from launch.training.run import MONITOR, TrainingRun


class Monitor:
    """The figures of each step for DeepSpeed's monitor."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def after_step(self, record: StepRecord) -> None:
        write(self._run, "train", record, "lr", "grad_norm", "seconds")

    def end(self, error: BaseException | None) -> None:
        """Have W&B write what it still holds: no rank ends by Python's own end."""
        with self._run.recorder.keeping(MONITOR):
            if getattr(self._run.engine.monitor, "wandb_monitor", None):
                sys.modules["wandb"].finish()


def write(
    run: TrainingRun, group: str, outcome: StepRecord | Validation, *more: str
) -> None:
    """Give the loss, its parts and `more` to the monitor, as far as they are finite."""
    values = {"loss": outcome.loss, **outcome.parts}
    values |= {name: getattr(outcome, name) for name in more}
    events = []
    for name, value in values.items():
        if finite(value) is not None:
            events.append((f"{group}/{name}", value, run.engine.global_samples))
    run.engine.monitor.write_events(events)
