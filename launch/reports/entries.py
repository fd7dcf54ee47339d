"""The entries of a table: each row with the runs of its recipe next to it, or with "not run"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.console import numbers
from launch.planning.comparability import Incomparable, not_comparable
from launch.planning.deviations import Deviation
from launch.reports.runs import OOM, Run, newest_first
from launch.reports.tables import Published, Row
from launch.runs import result
from launch.runs.result import Compared, Result

NOT_RUN = "not run"
RATIO_NAMES = {
    "time_per_iteration_s": "time",
    "samples_per_s": "samples/s",
    "tflops": "TFLOPS",
    "cached_gb": "cached",
    "parameters": "parameters",
}


@dataclass(frozen=True)
class Column:
    """A measured quantity. `key`: in the CSV; `heading` with its unit, for people."""

    key: str
    heading: str
    of: Callable[[Result], Any]
    show: Callable[[Any], str] = numbers.number

    def value(self, run: Run) -> Any:
        return self.of(run.result)

    def text(self, run: Run) -> str:
        return self.show(self.value(run))


def validation_loss(result: Result) -> float | None:
    return result.losses.validation.loss if result.losses.validation else None


MEASURED = (
    Column("steps", "steps", lambda result: result.steps),
    Column("time_per_iteration_s", "time per iteration (s)", lambda result: result.speed.seconds_per_step),
    Column("samples_per_s", "samples/s", lambda result: result.speed.samples_per_s),
    Column("tflops", "TFLOPS per GPU, formula", lambda result: result.speed.tflops),
    Column("exact_tflops", "TFLOPS per GPU, exact count", lambda result: result.speed.exact_tflops),
    Column("cached_gb", "cached per GPU (GB)", lambda result: numbers.gigabytes(result.memory.cached_bytes)),
    Column("parameters", "parameters", lambda result: result.parameters),
    Column("validation_loss", "validation loss (nats per token)", validation_loss, numbers.loss),
)


@dataclass(frozen=True)
class Entry:
    """A row and one run of it.

    Attributes:
        run: None: not run.
        compared: what the run's numbers are next to the published ones; empty where nothing was published.
        incomparable: why there are no ratios.
        memory: what came of running out of memory, published or measured, which has no ratios either.
        loss: the validation loss next to a published one.
    """

    row: Row
    run: Run | None = None
    compared: tuple[Compared, ...] = ()
    incomparable: Incomparable | None = None
    memory: str | None = None
    loss: str | None = None

    @property
    def status(self) -> str:
        return self.run.status if self.run else NOT_RUN

    @property
    def ratios(self) -> dict[str, float]:
        """Measured / published, by quantity."""
        return {each.quantity: each.ratio for each in self.compared if each.ratio is not None}

    @property
    def no_ratio(self) -> str | None:
        """Why there are no ratios; None where there are, or nothing to compare with."""
        return f"not compared: {self.incomparable}" if self.incomparable else self.memory

    @property
    def outcome(self) -> str:
        """The ratios as text, or why there are none; empty where nothing was published to compare with."""
        ratios = [f"{RATIO_NAMES[key]} {numbers.ratio(value)}" for key, value in self.ratios.items()]
        return self.no_ratio or ", ".join([*ratios, *([self.loss] if self.loss else [])])

    @property
    def deviations(self) -> list[Deviation]:
        """What the run itself stated, and what has changed in the table since."""
        stated = list(self.run.result.deviations) if self.run else []
        recipes = (self.row.recipe, self.run.recipe if self.run else None)
        if recipes[0] and recipes[1] and recipes[0].published != recipes[1].published:
            stated.append(Deviation("republished"))
        return stated


def measured_columns(table: Published) -> tuple[Column, ...]:
    """MEASURED, with the count of TFLOPS named that stands next to the published ones."""
    published = [row.recipe.published for row in table.rows if row.recipe and row.recipe.published]
    counted = {result.TFLOPS_BY[each.tflops_by][1] for each in published if each.tflops}
    return tuple(
        replace(column, heading=f"{column.heading} (as published)") if column.key in counted else column
        for column in MEASURED
    )


def entries_of(table: Published, runs: Sequence[Run]) -> list[Entry]:
    """Every row in the order of the table, each with its runs, newest first."""
    found = []
    for row in table.rows:
        own = newest_first([run for run in runs if run.name == row.full_name])
        found += [entry_of(row, run) for run in own] or [Entry(row)]
    return found


def entry_of(row: Row, run: Run) -> Entry:
    """The run compared with what its row published."""
    published = row.recipe.published if row.recipe else None
    if published is None:
        return Entry(row, run)
    why = not_comparable(row.recipe, run.plan, tiny=run.tiny, emulated_fp16=run.result.emulated_fp16)
    if why:
        return Entry(row, run, incomparable=why)
    if published.oom or run.status == OOM:
        as_published = (
            "OOM, as published" if run.status == OOM else f"published as OOM; this run: {run.status}"
        )
        return Entry(row, run, memory=as_published if published.oom else "OOM, published as running")
    compared = result.compare_with(published, run.result, comparable=True)
    return Entry(row, run, compared, loss=_next_to_published_loss(published.validation_loss, run))


def _next_to_published_loss(published: float | None, run: Run) -> str | None:
    """No ratio: the held-out text is another, and so may be the vocabulary."""
    validation = run.result.losses.validation
    if published is None or validation is None:
        return None
    measured = (validation.parts or {}).get("mlm_loss", validation.loss)
    here = f"validation loss {numbers.loss(measured)} here"
    return f"{here}, {published:g} published (each on its own held-out text)"
