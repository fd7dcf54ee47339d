"""Measure the speed of a training step next to other systems and the machine's matrix rate."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launch.experiments.launching import ROOT, own_environment
from launch.records.metrics import StartRecord, read_metrics
from tools.benchmarks.specification import Specification
from tools.benchmarks.turns import TurnWorker, WorkerFailed

RATE = "rate"  # the matrix rate, a system without a model
Say = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """Length of a measurement: per system `warm_up` steps, then `blocks` turns of `steps` steps."""

    blocks: int
    steps: int
    warm_up: int
    apart: bool = False  # run each system to its end before the next starts


@dataclass(eq=False)
class Measurement:
    """Measured values of one system. `failed`: reason for a failure."""

    spec: Specification
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    start_s: float | None = None  # from the start of the process to its first step
    warm_up_s: float | None = None  # of the first steps, with compilation
    peak_bytes: int | None = None
    phases: list[dict[str, float]] = field(default_factory=list)  # of each rank
    profile: dict[str, Any] | None = None
    graphs: dict[str, Any] | None = None  # of torch.compile
    rates: list[dict[str, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    # other programs' share of the cores, by turn
    others: list[float] = field(default_factory=list)
    failed: str | None = None


@dataclass(frozen=True)
class SpeedRow:
    """Speed of one system; `seconds` is the median per step, and rates follow from it.

    `share`: of the rate of a square product; `product_share`: of the rate of the model's products; `times`:
    seconds divided by those of the first row.
    """

    name: str
    seconds: float
    fastest: float
    tokens_per_s: float
    tflops: float
    share: float | None
    product_share: float | None
    peak_bytes: int | None
    times: float


def median_rates(measured: Sequence[Measurement]) -> tuple[float, float] | None:
    """Return the machine's median rates, in square products and in the model's; None: not measured."""
    found = [
        (rate["square"], rate["products"]) for each in measured for rate in each.rates
    ]
    if not found:
        return None
    square, products = map(statistics.median, zip(*found, strict=True))
    return square, products


def speed_rows(measured: Sequence[Measurement]) -> list[SpeedRow]:
    """Return a row per measured model, from median step times; the first is the reference."""
    models = {
        each: statistics.median(each.seconds) for each in measured if each.seconds
    }
    rates = median_rates(measured)
    rows = list[SpeedRow]()
    for each, seconds in models.items():
        rate = statistics.mean(each.operations) / seconds
        share = None
        product_share = None
        if rates:
            share = rate / rates[0]
            product_share = rate / rates[1]
        reference = rows[0].seconds if rows else seconds
        rows.append(
            SpeedRow(
                each.spec.name,
                seconds,
                fastest=min(each.seconds),
                tokens_per_s=statistics.mean(each.tokens) / seconds,
                tflops=rate / 1e12,
                share=share,
                product_share=product_share,
                peak_bytes=each.peak_bytes,
                times=seconds / reference,
            )
        )
    return rows


def measure(
    specs: Sequence[Specification], pace: Pace, say: Say, profile: Path | None = None
) -> list[Measurement]:
    """Measure every system in turns, block by block; record the failure of one and go on with the others."""
    found = [Measurement(spec) for spec in specs]
    groups = [[each] for each in found] if pace.apart else [found]
    with (
        tempfile.TemporaryDirectory(prefix="benchmark-") as folder,
        contextlib.ExitStack() as stack,
    ):
        turns = _Turns(pace, say, profile, Path(folder), stack)
        for together in groups:
            for work in (turns.start, *[turns.take] * pace.blocks, turns.end):
                for each in together:
                    if each.failed is None:
                        turns.attempt(work, each)
    return found


class _Turns:
    """The turns of the measured systems, with a worker for each."""

    def __init__(
        self,
        pace: Pace,
        say: Say,
        profile: Path | None,
        folder: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self._pace = pace
        self._say = say
        self._profile = profile
        self._folder = folder
        self._stack = stack
        self._workers: dict[str, TurnWorker] = {}

    def attempt(self, work: Callable[[Measurement], None], each: Measurement) -> None:
        """Do the work; record and say its failure."""
        try:
            work(each)
        except WorkerFailed as error:
            each.failed = str(error)
            self._say(f"{each.spec.name}: not measured: {error}")

    def start(self, each: Measurement) -> None:
        """Start the worker of a system and warm it up."""
        name = each.spec.name
        self._workers[name] = worker = TurnWorker(
            each.spec, self._folder / f"{len(self._workers)}.txt"
        )
        self._stack.callback(worker.end)
        each.start_s = worker.start_seconds
        each.said = worker.said
        began = time.perf_counter()
        if each.spec.system == RATE:
            worker.ask("rates", 1)
        else:
            worker.ask("run", self._pace.warm_up)
        each.warm_up_s = time.perf_counter() - began
        self._say(f"{name}: ready")

    def take(self, each: Measurement) -> None:
        """Measure a block of steps, and how busy other programs were meanwhile."""
        worker = self._workers[each.spec.name]
        began = time.perf_counter()
        others = _seconds_of_others()
        if each.spec.system == RATE:
            each.rates.append(worker.ask("rates", self._pace.steps))
        else:
            for seconds, tokens, operations in worker.ask("run", self._pace.steps):
                each.seconds.append(seconds)
                each.tokens.append(tokens)
                each.operations.append(operations)
        cores = (time.perf_counter() - began) * (psutil.cpu_count() or 1)
        each.others.append(max(0.0, _seconds_of_others() - others) / cores)

    def end(self, each: Measurement) -> None:
        """Measure what disturbs the timing, and end the worker."""
        worker = self._workers[each.spec.name]
        if each.spec.system != RATE:
            finish(worker, each, self._pace.steps, self._profile)
        worker.end()


def _seconds_of_others() -> float:
    """Return the CPU seconds of all programs but this one and its children, since the machine started."""
    every = psutil.cpu_times()
    found = float(every.user + every.system)
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found -= sum(process.cpu_times()[:2])
    return found


def finish(
    worker: TurnWorker, measured: Measurement, steps: int, profile: Path | None
) -> None:
    """Measure memory first, then phases and a profile, because these disturb the timing."""
    measured.peak_bytes = worker.ask("peak_bytes")
    measured.phases = worker.ask("phases", steps)
    if measured.spec.compiled:
        measured.graphs = worker.ask("graphs")
    if profile is not None:
        trace = (
            profile / f"{measured.spec.name.replace(',', '').replace(' ', '-')}.json"
        )
        measured.profile = worker.ask("profile", str(trace), min(2, steps))


def launch_seconds(spec: Specification) -> StartRecord:
    """Measure the seconds from the start of pretrain.py to its first step's end. Raises WorkerFailed."""
    settings = [
        *spec.settings,
        "run.save_every=0",
        "run.save_last=false",
        "run.prompt=null",
    ]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        command = [
            sys.executable,
            str(ROOT / "launch/pretrain.py"),
            "--recipe",
            spec.recipe,
            "--steps",
            "1",
        ]
        command += [
            "--compile",
            "off",
            "--out",
            f"{folder}/run",
            *["--tiny"] * spec.tiny,
        ]
        command += ["--ds_config", spec.ds_config]
        command += [f"--set={setting}" for setting in settings]
        done = subprocess.run(
            command, env=own_environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise WorkerFailed(
                f"pretrain.py ended with code {done.returncode}: {done.stderr.strip()[-500:]}"
            )
        (start,) = read_metrics(Path(folder) / "run/metrics.jsonl").starts
    return start
