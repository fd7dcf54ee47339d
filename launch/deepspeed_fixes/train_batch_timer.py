"""The pipeline engine's timer of whole batches: it keeps every batch in memory.

DeepSpeed 0.19.8 (`train_batch` of runtime/pipe/engine.py) starts and stops it at each step, and empties its
list at the steps alone that steps_per_print has printed. Our JSONs have none printed (10^9), so that a run on
GPUs keeps two CUDA events of every step.
Upstream: no issue found. Worth another look when
    `test_train_batch_timer.py::test_deepspeed_keeps_the_time_of_every_batch` fails.
"""

from __future__ import annotations

from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine

MOST = 1000  # steps between two printed ones whose times are kept


def forget_batches(engine: PipelineEngine) -> None:
    """Empty the list, unless a line that is soon to be printed needs its sum."""
    every = engine.steps_per_print()
    if every is None or every > MOST:
        engine.timers(TRAIN_BATCH_TIMER).reset()
