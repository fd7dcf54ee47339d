"""Published rows and runs next to the planner's predictions: time, share of peak, free memory, scaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ds_configs.plan import Plan
from launch.console.text_table import number
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import MOST_SHARE, Forecast, forecast, speed
from launch.planning.prediction.forecast_text import error
from launch.planning.prediction.published_step import (
    published_seconds,
    published_workload,
)
from launch.planning.resolved_plans import resolve_on_machine
from launch.records.result import Speed
from launch.reports.entries import RowEntry
from launch.reports.frames import ReportTable
from launch.reports.runs import ReportedRun
from modeling import cost
from recipes.schema import Published, Recipe

PUBLISHED = "published"
HEADINGS = (
    "recipe",
    "",
    "time per iteration (s)",
    "predicted (s)",
    "predicted / it",
    "MFU",
    "MFU predicted",
    "memory left",
    "predicted",
    "samples/s x parameters, smallest = 1",
    "TFLOPS per GPU, fewest GPUs = 1",
)
# Fields of a PredictionLine: predictions and derived numbers.
PREDICTED = (
    "predicted_s",
    "mfu",
    "predicted_mfu",
    "left",
    "predicted_left",
    "normalised",
    "scaling",
)
EXPLAINED = (
    "Published rows are predicted on the hardware that they name, as the system that they name runs them; "
    "runs on the machine that they ran on. MFU: operations of the model, none counted twice, over the peak "
    "rate. Memory left: what torch does not hold. The last two "
    "columns compare rows of as many GPUs, and rows of different numbers of GPUs: published ones with "
    "published ones, runs with runs on the same machine. The planner's error: "
)


@dataclass(frozen=True)
class PredictionLine:
    """A published row or a run; None: unknown. Shares are of 1.

    Attributes:
        where: group of comparable lines: published rows, or runs on one machine.
        speed: a row's seconds per step are derived from samples/s or TFLOPS where it prints no time.
        oom, predicted_oom: memory did not suffice, or is predicted not to suffice.
        mfu: share of the peak rate, without recomputation (Chowdhery et al. 2022, appendix B).
        normalised: samples/s times parameters, relative to the smallest model on as many GPUs.
        scaling: TFLOPS per GPU, relative to the line with the fewest GPUs.
    """

    name: str
    label: str
    where: str = PUBLISHED
    gpus: int | None = None
    parameters: int | None = None
    speed: Speed = Speed()
    predicted_s: float | None = None
    mfu: float | None = None
    predicted_mfu: float | None = None
    left: float | None = None
    predicted_left: float | None = None
    oom: bool = False
    predicted_oom: bool = False
    normalised: float | None = None
    scaling: float | None = None

    @property
    def has_numbers(self) -> bool:
        """Check that the line has a prediction or a derived number."""
        return (
            self.oom
            or self.predicted_oom
            or any(getattr(self, key) for key in PREDICTED)
        )

    @property
    def is_implausible(self) -> bool:
        """Check that a GPU is said to reach more of its peak than published rows do."""
        return bool(self.gpus and self.mfu and 100 * self.mfu > MOST_SHARE)

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the line as text in the columns of HEADINGS."""
        unknown = "not published" if self.label == PUBLISHED else "not measured"
        predicted = "not predicted"
        seconds = self.speed.seconds_per_step
        ratio = self.predicted_s / seconds if self.predicted_s and seconds else None
        time = unknown if seconds is None else number(seconds)
        no_mfu = "" if self.oom else unknown
        return (
            self.name,
            self.label,
            "OOM" if self.oom else time,
            predicted if self.predicted_s is None else number(self.predicted_s),
            "" if ratio is None else f"{ratio:.2f}",
            _share(self.mfu, no_mfu),
            _share(self.predicted_mfu, predicted),
            "OOM" if self.oom else _share(self.left, unknown),
            "OOM" if self.predicted_oom else _share(self.predicted_left, predicted),
            "" if self.normalised is None else f"{self.normalised:.3g}",
            _share(self.scaling, ""),
        )


def _share(value: float | None, unknown: str) -> str:
    return unknown if value is None else f"{value:.1%}"


def frame(lines: Sequence[PredictionLine]) -> ReportTable | None:
    """Return the table of the lines; None without any prediction or derived number."""
    if not any(line.has_numbers for line in lines):
        return None
    kinds = ("name", "text", *["number"] * (len(HEADINGS) - 2))
    title = "Predicted beside published and measured"
    explained = (
        f"{EXPLAINED}time {error('time')}; {error('unseen')}; memory {error('memory')}."
    )
    doubted = [
        f"{line.name} ({line.label}, {line.mfu:.0%})"
        for line in lines
        if line.is_implausible
    ]
    if doubted:
        explained += f" No sound row has {MOST_SHARE:g} % of a GPU's peak; doubt {', '.join(doubted)}."
    return ReportTable(
        HEADINGS, kinds, [line.cells for line in lines], title, explained
    )


def lines_of(entries: Sequence[RowEntry]) -> list[PredictionLine]:
    """Return a line for each published row, followed by its runs; tiny runs are not compared."""
    found: list[PredictionLine] = []
    for row, each in groupby(entries, key=lambda entry: entry.row):
        if row.recipe and row.recipe.published:
            found.append(_of_row(row.full_name, row.recipe, row.recipe.published))
        found += [_of_run(row.full_name, entry.run) for entry in each if entry.run]
    return list(_compared(found))


def _of_row(name: str, recipe: Recipe, published: Published) -> PredictionLine:
    theirs = _as_their_system(recipe)
    work = theirs.work if theirs else None
    seconds = published_seconds(recipe, published, work)
    samples_per_s = recipe.batch.global_ / seconds if seconds else None
    gpus = recipe.hardware.gpus if recipe.hardware else None
    line = PredictionLine(
        name,
        PUBLISHED,
        gpus=gpus,
        parameters=cost.parameters(recipe.model, recipe.positions),
        speed=Speed(seconds, samples_per_s=samples_per_s),
        oom=published.oom,
    )
    if not (theirs and theirs.time and theirs.speed):
        return line
    if seconds:
        reached = speed(theirs.work, theirs.node, seconds)
        as_exact = replace(line.speed, exact_tflops=reached.exact_tflops)
        line = replace(line, mfu=reached.mfu, speed=as_exact)
    room = theirs.node.gpu.memory_bytes
    memory = published.cached_gb
    left = 1 - memory * hardware.GIB / room if memory else None
    return replace(
        line,
        gpus=theirs.work.layout.world,
        predicted_s=theirs.time.total,
        predicted_mfu=theirs.speed.mfu,
        left=left,
        predicted_left=1 - theirs.fullest_rank.cached(room) / room,
        predicted_oom=theirs.verdict == "out of memory",
    )


def _as_their_system(recipe: Recipe) -> Forecast | None:
    """Forecast the row on its hardware and system; None where catalogue or planner lacks one of them."""
    named = recipe.hardware.node if recipe.hardware else None
    if named is None:
        return None
    try:
        node = hardware.node_for(recipe)
        plan = resolve_on_machine(recipe, recipe.ds_config, machine=node.machine)
        step = published_workload(plan)
        return forecast(step, node) if step else None
    # a broken recipe, configuration or catalogue of the user
    except (ValueError, OSError):
        return None


def _of_run(name: str, run: ReportedRun) -> PredictionLine:
    result = run.result
    seconds = run.result.speed.seconds_per_step
    plan = run.plan
    machine = ", ".join(
        str(run.machine.get(key)) for key in ("accelerator", "cpu", "cores")
    )
    where = "" if run.tiny else f"run on {machine}"
    # Processes that share cores are no GPUs.
    gpus = (
        result.layout.world
        if result.layout and run.machine.get("accelerators")
        else None
    )
    line = PredictionLine(
        name,
        run.full_label,
        where=where,
        gpus=gpus,
        parameters=result.parameters,
        speed=result.speed,
        oom=result.status == "OOM",
    )
    if plan is None or any(each.kind == "measured" for each in result.deviations):
        return line  # speed and memory are from steps under an earlier plan
    room = _available(plan, run.machine)
    used = result.memory.cached_bytes or result.memory.peak_bytes
    if used and room:
        line = replace(line, left=1 - used / room)
    found = run_forecast(plan, run.machine)
    if found is None:
        return line
    needed = found.fullest_rank.total
    predicted = found.time.total if found.time else None
    predicted_mfu = found.speed.mfu if found.speed else None
    mfu = None
    if predicted_mfu and predicted and seconds:
        # Same operations as in the predicted step, but the measured time.
        mfu = predicted_mfu * predicted / seconds
    predicted_left = 1 - needed / room if room else None
    return replace(
        line,
        predicted_s=predicted,
        mfu=mfu,
        predicted_mfu=predicted_mfu,
        predicted_left=predicted_left,
        predicted_oom=bool(room and needed > room),
    )


def run_forecast(plan: Plan, machine: Mapping[str, Any]) -> Forecast | None:
    """Forecast the step on the run's machine; None where the catalogue does not have its GPUs.

    `machine`: `description.describe()`.
    """
    try:
        name = str(machine["accelerator"])
        count = machine["accelerators"]
        node = hardware.catalogue_node(name, count) if count else None
        return forecast(workload.of_plan(plan), node) if node else None
    except (ValueError, KeyError):  # the file does not describe it
        return None


def _available(plan: Plan, machine: Mapping[str, Any]) -> float | None:
    """Return the bytes of a GPU, or a process's share of the host memory."""
    each = machine.get("accelerator_memory_gb")
    if each is not None:
        return float(each) * 1e9
    whole = machine.get("memory_gb")
    return None if whole is None else float(whole) * 1e9 / plan.layout.world


def _compared(lines: Sequence[PredictionLine]) -> Iterator[PredictionLine]:
    for line in lines:
        others = [each for each in lines if line.where and each.where == line.where]
        as_many = [
            each
            for each in others
            if each.gpus == line.gpus and each.speed.samples_per_s
        ]
        normalised = scaling = None
        if len({each.parameters for each in as_many}) > 1 and line.speed.samples_per_s:
            smallest = min(as_many, key=lambda each: each.parameters or 0)
            normalised = _work(line) / _work(smallest)
        measured = [each for each in others if each.gpus and each.speed.exact_tflops]
        tflops = line.speed.exact_tflops
        if len({each.gpus for each in measured}) > 1 and line.gpus and tflops:
            fewest = min(measured, key=lambda each: each.gpus or 0)
            scaling = tflops / (fewest.speed.exact_tflops or tflops)
        yield replace(line, normalised=normalised, scaling=scaling)


def _work(line: PredictionLine) -> float:
    return (line.speed.samples_per_s or 0.0) * (line.parameters or 0)
