"""A measured system on one rank: its batches, the clock of its phases, and what is measured of it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity

from data.corpus import build as build_corpus
from data.loader import MicroBatch
from launch.machine import description
from launch.machine.memory import peak_memory
from launch.ranks import processes
from launch.training.job import plan_job
from launch.training.micro_batches import training_batches
from launch.training.run import next_batch
from modeling import cost
from modeling.initialization import DTYPES
from modeling.parallel.layers import seed_step
from modeling.parallel.process_grid import ProcessGrid
from recipes.schema import Recipe
from tools.benchmarks.specification import Specification

SHOWN = 15  # lines of a profile
# Kernels of attention: FlashAttention's, cuDNN's, the memory-efficient ones, and plain softmax.
ATTENTION = re.compile(
    "flash|fmha|efficient|sdpa|cudnn.*attention|attention.*cudnn|flex|(?<!log)(?<!log_)softmax",
    re.IGNORECASE,
)


class Work(NamedTuple):
    """Tokens and operations of a step, without padding."""

    tokens: int
    operations: int  # of matrix products, forward and backward, without recomputation


def work_of(recipe: Recipe, batch: MicroBatch) -> Work:
    """Return the work of one micro-batch."""
    count = cost.exact_flops_per_step
    if "lengths" not in batch:
        samples, length = batch["tokens"].shape
        return Work(samples * length, count(recipe.model, length, samples))
    lengths = batch["lengths"].tolist()
    predicted = (batch["weights"] > 0).sum(1).tolist()
    each = (
        count(recipe.model, s, 1, predictions=p)
        for s, p in zip(lengths, predicted, strict=True)
    )
    return Work(sum(lengths), sum(each))


class Clock:
    """Sum of seconds by phase while `running`; waits for the GPU at both ends of a phase.

    `with clock(phase)` clocks a block, `clock(phase)(function)` each call of a function.
    """

    def __init__(self) -> None:
        self.running = False
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = now() if self.running else 0.0
        yield
        if self.running:
            self.seconds[phase] += now() - started


def now() -> float:
    """Return the time in seconds, after the GPU has finished its work."""
    get_accelerator().synchronize()
    return time.perf_counter()


class MeasuredSystem:
    """The batches of a training from its own loader, and a `step` that trains on the next ones.

    Attributes:
        loss: of the last step.
        said: what the system said while it was built.
    """

    def __init__(self, spec: Specification) -> None:
        self.clock = Clock()
        self.loss: float | None = math.nan
        self.said: list[str] = []
        self.recipe = spec.load()
        machine = description.detect_machine()
        compiled = spec.compiled
        self.plan = plan_job(
            self.recipe,
            spec.ds_config,
            machine,
            compiled=compiled,
            initial_weights=None,
        )
        layout = self.plan.layout
        self.grid = ProcessGrid(layout.tp, layout.pp, layout.dp)
        corpus = build_corpus(self.recipe, say=lambda text: None)
        self.batches = training_batches(self.plan, corpus, self.grid, None)
        self.device = torch.device(get_accelerator().current_device_name())
        self.dtype = DTYPES[self.plan.precision]
        self.done = 0

    def take(self) -> tuple[Sequence[Any], Work]:
        """Return the micro-batches of the next step, and their work over all ranks."""
        seed_step(self.recipe.seed, self.done, self.grid.at)
        batches = next_batch(self.batches)
        self.done += 1
        tokens, operations = map(
            sum, zip(*(work_of(self.recipe, batch) for batch in batches), strict=True)
        )
        return batches, Work(tokens * self.grid.dp, operations * self.grid.dp)

    def step(self) -> Work:
        raise NotImplementedError

    def run(self, steps: int) -> list[tuple[float, int, int]]:
        """Run `steps` steps and return (seconds, tokens, operations) of each."""
        found = []
        for _ in range(steps):
            started = now()
            work = self.step()
            found.append((now() - started, *work))
        return found

    def phases(self, steps: int) -> list[dict[str, float]]:
        """Return mean seconds per phase on every rank over `steps` steps; "step" is the whole step."""
        self.clock.seconds.clear()
        self.clock.running = True
        whole = sum(seconds for seconds, *_ in self.run(steps))
        self.clock.running = False
        own = {"step": whole, **self.clock.seconds}
        return processes.gathered(
            {name: seconds / steps for name, seconds in own.items()},
            self.grid.control_group,
        )

    def profile(self, trace: str | None, steps: int) -> dict[str, Any]:
        """Profile rank 0: the slowest operations and attention's kernels; write a Chrome trace."""
        gpu = processes.device().own_memory
        kinds = torch.profiler.supported_activities() if gpu else {ProfilerActivity.CPU}
        with torch.profiler.profile(activities=kinds) as profiler:
            self.run(steps)
        averages = profiler.key_averages()
        lasting = "self_device_time_total" if gpu else "self_cpu_time_total"
        top = sorted(averages, key=lambda event: -getattr(event, lasting))[:SHOWN]
        if trace and os.environ.get("RANK", "0") == "0":
            profiler.export_chrome_trace(trace)
        return {
            "attention": sorted(
                {e.key[:100] for e in averages if ATTENTION.search(e.key)}
            ),
            "top": [
                (e.key[:80], getattr(e, lasting) / 1e6 / steps, e.count / steps)
                for e in top
            ],
        }

    def graphs(self) -> dict[str, Any]:
        """Count the graphs of torch.compile so far, and the reasons of graph breaks."""
        from torch._dynamo.utils import counters

        breaks = {
            reason[:200]: count for reason, count in counters["graph_break"].items()
        }
        return {"graphs": counters["stats"].get("unique_graphs", 0), "breaks": breaks}

    def peak_bytes(self) -> int:
        """Return the largest memory peak of any rank."""
        return max(processes.gathered(peak_memory().bytes, self.grid.control_group))
