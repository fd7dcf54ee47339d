"""Measure the speed of a training step next to other systems and the machine's matrix rate."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.turns import ROOT, Worker, WorkerFailed
from launch.records.metrics import StartRecord, read_metrics

RATE = "rate"  # the matrix rate, a system without a model
Say = Callable[[str], None]


@dataclass(frozen=True)
class Pace:
    """Length of a measurement: per system `warm_up` steps, then `blocks` turns of `steps` steps."""

    blocks: int
    steps: int
    warm_up: int
    apart: bool = False  # run each system to its end before the next starts


@dataclass
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
    others: list[float] = field(default_factory=list)  # other programs' share of the cores, by turn
    failed: str | None = None


@dataclass(frozen=True)
class SpeedRow:
    """Speed of one system; `seconds` is the median per step, and rates follow from it.

    `share`: of the rate of a square product; `product_share`: of the rate of the model's products; `times`:
    seconds divided by the reference's seconds.
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


def speed_rows(measured: Sequence[Measurement], reference: str | None = None) -> list[SpeedRow]:
    """Return a row per measured model, from median step times.

    `reference`: name of the row to compare with; None: the first.
    """
    rates = [rate for each in measured for rate in each.rates]
    square, products = (
        statistics.median(rate[key] for rate in rates) if rates else None for key in ("square", "products")
    )
    models = [each for each in measured if each.seconds]
    medians = {each.spec.name: statistics.median(each.seconds) for each in models}
    base = medians.get(reference or next(iter(medians), ""))
    rows = []
    for each in models:
        seconds = medians[each.spec.name]
        operations = statistics.mean(each.operations) / seconds
        rows.append(
            SpeedRow(
                each.spec.name,
                seconds,
                min(each.seconds),
                statistics.mean(each.tokens) / seconds,
                operations / 1e12,
                operations / square if square else None,
                operations / products if products else None,
                each.peak_bytes,
                seconds / base if base else float("nan"),
            )
        )
    return rows


def measure(
    specs: Sequence[Specification], pace: Pace, say: Say, profile: Path | None = None
) -> list[Measurement]:
    """Measure every system in turns, block by block; record the failure of one and go on with the others."""
    found = [Measurement(spec) for spec in specs]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, contextlib.ExitStack() as stack:
        workers: dict[int, Worker] = {}

        def start(index: int) -> None:
            workers[index] = worker = Worker(specs[index], Path(folder) / str(index))
            stack.callback(worker.end)
            found[index].start_s, found[index].said = worker.start_seconds, worker.said
            warm_up(worker, found[index], pace)
            say(f"{specs[index].name}: ready")

        def turn(index: int) -> None:
            with record_other_load(found[index]):
                block(workers[index], found[index], pace.steps)

        def last(index: int) -> None:
            finish(workers[index], found[index], pace.steps, profile)
            workers[index].end()

        every = range(len(specs))
        for together in [[index] for index in every] if pace.apart else [every]:
            for work in (start, *[turn] * pace.blocks, last):
                for index in together:
                    if found[index].failed is None:
                        with record_failure(found[index], say):
                            work(index)
    return found


@contextlib.contextmanager
def record_failure(measured: Measurement, say: Say) -> Iterator[None]:
    """Record the failure of a system's worker."""
    try:
        yield
    except WorkerFailed as error:
        measured.failed = str(error)
        say(f"{measured.spec.name}: not measured: {error}")


@contextlib.contextmanager
def record_other_load(measured: Measurement) -> Iterator[None]:
    """Record the share of the cores that other programs used during the block."""
    started, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    yield
    cores = (time.perf_counter() - started) * (psutil.cpu_count() or 1)
    measured.others.append(max(0.0, (_busy_seconds() - busy) - (_own_seconds() - own)) / cores)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system)


def _own_seconds() -> float:
    found = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            found += process.cpu_times().user + process.cpu_times().system
    return found


def warm_up(worker: Worker, measured: Measurement, pace: Pace) -> None:
    started = time.perf_counter()
    if measured.spec.system == RATE:
        worker.ask("rates", 1)
    else:
        worker.ask("run", pace.warm_up)
    measured.warm_up_s = time.perf_counter() - started


def block(worker: Worker, measured: Measurement, steps: int) -> None:
    """Measure one turn of a system."""
    if measured.spec.system == RATE:
        measured.rates.append(worker.ask("rates", steps))
        return
    for seconds, tokens, operations in worker.ask("run", steps):
        measured.seconds.append(seconds)
        measured.tokens.append(tokens)
        measured.operations.append(operations)


def finish(worker: Worker, measured: Measurement, steps: int, profile: Path | None) -> None:
    """Measure memory first, then phases and a profile, because these disturb the timing."""
    if measured.spec.system == RATE:
        return
    measured.peak_bytes = worker.ask("memory")["peak_bytes"]
    measured.phases = worker.ask("phases", steps)
    if measured.spec.compiled:
        measured.graphs = worker.ask("graphs")
    if profile is not None:
        trace = profile / f"{measured.spec.name.replace(',', '').replace(' ', '-')}.json"
        measured.profile = worker.ask("profile", str(trace), min(2, steps))


def launch_seconds(spec: Specification) -> StartRecord:
    """Measure the seconds from the start of pretrain.py to its first step's end. Raises WorkerFailed."""
    settings = [*spec.settings, "run.save_every=0", "run.save_last=false", "run.prompt=null"]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        command = [sys.executable, str(ROOT / "launch/pretrain.py"), "--recipe", spec.recipe, "--steps", "1"]
        command += [part for setting in settings for part in ("--set", setting)]
        command += ["--ds_config", spec.ds_config] if spec.ds_config else []
        command += ["--tiny"] if spec.tiny else []
        command += ["--compile", "off"]
        done = subprocess.run([*command, "--out", f"{folder}/run"], capture_output=True, text=True)
        if done.returncode:
            raise WorkerFailed(f"pretrain.py ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        (start,) = read_metrics(Path(folder) / "run/metrics.jsonl").starts
    return start
