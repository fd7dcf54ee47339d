"""Predicted beside published and measured; share of peak, memory left, normalised throughput and scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby

from launch.console import numbers
from launch.planning.prediction import hardware
from launch.planning.prediction.forecast import Forecast, forecast, speed
from launch.planning.prediction.published_step import as_published, published_seconds
from launch.planning.resolved_plans import planned
from launch.records.result import Result
from launch.reports.entries import Entry
from launch.reports.prediction import of_run
from launch.reports.runs import Run
from modeling import cost
from recipes.schema import Published, Recipe

PUBLISHED = "published"
HEADINGS = (
    *("recipe", "", "time per iteration (s)", "predicted (s)", "predicted / it", "MFU", "MFU predicted"),
    *("memory left", "predicted", "samples/s x parameters, smallest = 1", "TFLOPS per GPU, fewest GPUs = 1"),
)
EXPLAINED = (
    "Published rows are predicted on the hardware that they name, as the system that they name runs them; "
    "runs on the machine that they ran on. MFU: operations of the model, none counted twice, over the peak "
    "rate (of cores: the rate that was measured). Memory left: what torch does not hold. The last two "
    "columns compare rows of as many GPUs, and rows of different numbers of GPUs: published ones with "
    "published ones, runs with runs on the same machine."
)


@dataclass(frozen=True)
class Line:
    """A published row or a run; None: not known. Shares are of 1.

    Attributes:
        where: what it can be compared with: published rows, or runs on one machine.
        seconds: per step; of a row that prints none, from its samples/s or its TFLOPS.
        oom, predicted_oom: it did not fit, or is not predicted to.
        left: share of the memory that is not taken.
        normalised: samples/s times parameters, relative to the smallest model on as many GPUs.
        scaling: TFLOPS per GPU, relative to those of the fewest GPUs.
    """

    name: str
    label: str
    where: str = PUBLISHED
    gpus: int | None = None
    parameters: int | None = None
    samples_per_s: float | None = None
    tflops: float | None = None
    seconds: float | None = None
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
    def known(self) -> bool:
        """Whether there is more to say than what was printed."""
        return any(getattr(self, field.name) for field in fields(self)[8:])

    @property
    def cells(self) -> tuple[str, ...]:
        """As HEADINGS."""
        published = self.label == PUBLISHED
        without = "not published" if published else "not measured"
        ratio = self.predicted_s / self.seconds if self.predicted_s and self.seconds else None
        left = "OOM" if self.oom else _shown(self.left, _percent, without)
        return (
            self.name, self.label,
            "OOM" if self.oom else _shown(self.seconds, numbers.number, without),
            _shown(self.predicted_s, numbers.number, "not predicted"),
            _shown(ratio, lambda value: f"{value:.2f}", ""),
            _shown(self.mfu, _percent, "" if self.oom else without),
            _shown(self.predicted_mfu, _percent, "not predicted"), left,
            "OOM" if self.predicted_oom else _shown(self.predicted_left, _percent, "not predicted"),
            _shown(self.normalised, lambda value: f"{value:.3g}", ""), _shown(self.scaling, _percent, ""),
        )  # fmt: skip


def lines_of(entries: Sequence[Entry]) -> list[Line]:
    """Of every row what was published, then its runs; tiny runs are compared with none."""
    found: list[Line] = []
    for row, each in groupby(entries, key=lambda entry: entry.row):
        if row.recipe and row.recipe.published:
            found.append(_of_row(row.full_name, row.recipe, row.recipe.published))
        found += [_of_run(row.full_name, entry.run) for entry in each if entry.run]
    return list(_compared(found))


def _of_row(name: str, recipe: Recipe, published: Published) -> Line:
    theirs, batch = _planned(recipe), recipe.batch.global_
    seconds = published_seconds(recipe, published, theirs.work if theirs else None)
    world = recipe.hardware.gpus if recipe.hardware else None
    line = Line(name, PUBLISHED, gpus=world, oom=published.oom, seconds=seconds)
    line = replace(line, parameters=cost.parameters(recipe.model, recipe.positions))
    if theirs and theirs.time and theirs.speed:
        room, memory = theirs.node.gpu.memory_bytes, published.cached_gb
        reached = speed(theirs.work, theirs.node, seconds) if seconds else None
        line = replace(
            line, gpus=theirs.work.layout.world, seconds=seconds, predicted_s=theirs.time.total,
            mfu=reached.mfu if reached else None, predicted_mfu=theirs.speed.mfu,
            tflops=reached.exact_tflops if reached else None,
            left=1 - memory * hardware.GIB / room if memory else None,
            predicted_left=1 - theirs.fullest.cached(room) / room,
            predicted_oom=theirs.verdict == "out of memory",
        )  # fmt: skip
    return replace(line, samples_per_s=batch / seconds if seconds else None)


def _planned(recipe: Recipe) -> Forecast | None:
    """The row on its hardware as its system ran it; None where the catalogue or the planner has not both."""
    named = recipe.hardware.node if recipe.hardware else None
    if named in (None, hardware.THIS):  # a report measures nothing
        return None
    try:
        node = hardware.node_for(recipe)
        plan = planned(recipe, recipe.ds_config, node, None)
        step = as_published(plan)
        return forecast(step, node) if step else None
    except (ValueError, OSError):  # of a user's recipe, configuration or catalogue
        return None


def _of_run(name: str, run: Run) -> Line:
    result: Result = run.result
    said, world = of_run(run.plan, run.machine, result), result.layout.world if result.layout else None
    gpus = world if run.machine.get("accelerators") else None  # processes that share cores are no GPUs
    room, needed, seconds = said.available_bytes, said.bytes_per_process, result.speed.seconds_per_step
    return Line(
        name, label_of(run), where="" if run.tiny else _machine(run), gpus=gpus, parameters=result.parameters,
        samples_per_s=result.speed.samples_per_s, tflops=result.speed.exact_tflops,
        seconds=seconds, predicted_s=said.seconds_per_step, mfu=said.reached_mfu(seconds),
        predicted_mfu=said.mfu, left=said.left_by(result.memory.cached_bytes or result.memory.peak_bytes),
        predicted_left=1 - needed / room if needed and room else None, oom=result.status == "OOM",
        predicted_oom=bool(needed and room and needed > room),
    )  # fmt: skip


def label_of(run: Run) -> str:
    """How a run is called in its line."""
    return run.label + (" (TINY)" if run.tiny else "")


def _machine(run: Run) -> str:
    return "run on " + ", ".join(str(run.machine.get(key)) for key in ("accelerator", "cpu", "cores"))


def _compared(lines: Sequence[Line]) -> Iterator[Line]:
    for line in lines:
        others = [each for each in lines if line.where and each.where == line.where]
        as_many = [each for each in others if each.gpus == line.gpus and each.samples_per_s]
        sizes = {each.parameters for each in as_many}
        normalised = scaling = None
        if len(sizes) > 1 and line.samples_per_s:
            smallest = min(as_many, key=lambda each: each.parameters or 0)
            normalised = _work(line) / _work(smallest)
        measured = [each for each in others if each.gpus and each.tflops]
        if len({each.gpus for each in measured}) > 1 and line.gpus and line.tflops:
            fewest = min(measured, key=lambda each: each.gpus or 0)
            scaling = line.tflops / (fewest.tflops or line.tflops)
        yield replace(line, normalised=normalised, scaling=scaling)


def _work(line: Line) -> float:
    return (line.samples_per_s or 0.0) * (line.parameters or 0)


def _shown(value: float | None, form: Callable[[float], str], without: str) -> str:
    return without if value is None else form(value)


def _percent(share: float) -> str:
    return f"{share:.1%}"
