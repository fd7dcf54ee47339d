"""How fast the loader is, and what of a training step it takes. For `launch/benchmark.py`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from recipes.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
WARM_STEPS = 5  # whose times are left out: files are mapped, memory is touched
GOAL = 0.02  # of the step


class Layout(NamedTuple):
    """One rank takes the whole batch."""

    micro: int
    accumulation: int
    dp: int
    global_batch: int


def measure(
    recipe: Recipe, samples: Any, workers: int, steps: int, step_seconds: float | None
) -> dict[str, Any]:
    """Steps of `StepBatches` in one rank that takes the global batch as one micro-batch.

    Args:
        workers: threads that make batches ahead.
        step_seconds: of training; the loader is then also read with such pauses, in which threads can work. None: not known.

    Returns:
        microseconds_per_step: mean, one step asked for right after the other; tokens_per_s: at that pace.
        wait_microseconds: median wait for a batch after a pause of `step_seconds`, and its share of the step; None: not measured.
    """
    from data.loader import StepBatches

    size = recipe.batch.global_
    batches = StepBatches(samples, recipe.seed, Layout(size, 1, 1, size), 0, workers=workers)
    try:
        pace = statistics.mean(
            _waits(batches, steps, 0.0)
        )  # not the median: a thread that is ahead makes most of them free
        # Pauses make it slow: as many as fit ten seconds, and at least five.
        wait = (
            statistics.median(_waits(batches, max(5, min(steps, int(10 / step_seconds))), step_seconds))
            if step_seconds
            else None
        )
    finally:
        batches.close()
    return {
        "workers": workers,
        "microseconds_per_step": pace * 1e6,
        "tokens_per_s": size * recipe.sequence_length / pace,
        "wait_microseconds": None if wait is None else wait * 1e6,
        "wait_share_of_step": None if wait is None or step_seconds is None else wait / (step_seconds + wait),
    }


def _waits(batches: Any, steps: int, pause: float) -> list[float]:
    """Seconds that each of `steps` batches is waited for, after some that are not counted."""
    seconds = []
    for step in range(steps + WARM_STEPS):
        if pause and step >= WARM_STEPS:  # even sleep(0) would let threads work in time that is not counted
            time.sleep(pause)
        started = time.perf_counter()
        next(batches)
        seconds.append(time.perf_counter() - started)
    return seconds[WARM_STEPS:]


def train(name: str, overrides: list[str], steps: int) -> dict[str, float]:
    """Trains for some steps and returns the medians of `seconds` per step and of `data_seconds`, the wait for the batch in it.

    Raises:
        ValueError: training failed.
    """
    from launch.runs.throughput import steady_seconds

    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(ROOT / "launch/pretrain.py"),
            "--recipe",
            name,
            "--steps",
            str(steps),
            "--out",
            f"{folder}/run",
        ]
        for override in ("run.validate_every=0", "run.save_every=0", "run.prompt=null", *overrides):
            command += ["--set", override]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(
                f"--train_steps {steps}: training of {name} ended with code {done.returncode}\n{done.stderr[-2000:]}"
            )
        records = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    steady = steady_seconds(records)
    assert steady is not None, "there was at least one step"
    waits = [
        record["data_seconds"] for record in records if record["kind"] == "step" and record["launch_step"] > 1
    ]
    return {"seconds": steady[0], "data_seconds": statistics.median(waits) if waits else 0.0}
