"""Entries of a table in a report: each row with the runs of its recipe, or "not run"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from launch.console import numbers
from launch.records.comparability import Incomparable, changed_work, not_comparable
from launch.records.deviations import Deviation
from launch.records.result import TFLOPS_BY, ComparedQuantity, Result, compare_with
from launch.reports.runs import OOM, Run
from launch.reports.tables import PublishedRow, PublishedTable

Scale = Literal["full", "tiny", "other", "unknown"]  # size of a run compared with its row
NOT_RUN = "not run"
NO_RECIPE = "no recipe"  # of a line about a model that this project cannot train
OTHER_MODEL = ("model.", "sequence_length")  # prefixes of keys; a change makes another model
RATIO_NAMES = {
    "time_per_iteration_s": "time",
    "samples_per_s": "samples/s",
    "tflops": "TFLOPS",
    "cached_gb": "cached",
    "parameters": "parameters",
}


@dataclass(frozen=True)
class Column:
    """A measured quantity. `key` names it in the CSV; `heading` includes the unit."""

    key: str
    heading: str
    of: Callable[[Result], Any]
    show: Callable[[Any], str] = numbers.number

    def text(self, run: Run) -> str:
        return self.show(self.of(run.result))


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
    Column("validation_loss", "validation loss (nats)", validation_loss, numbers.loss),
)


@dataclass(frozen=True)
class Entry:
    """A row, alone or with one run of it.

    Attributes:
        compared: the run's numbers next to the published ones; empty where nothing was published.
        incomparable: the reason why there are no ratios.
        memory: words about an out-of-memory error, published or measured; such a run has no ratios.
    """

    row: PublishedRow
    run: Run | None = None
    compared: tuple[ComparedQuantity, ...] = ()
    incomparable: Incomparable | None = None
    memory: str | None = None

    @property
    def status(self) -> str:
        if self.row.no_recipe:
            return NO_RECIPE
        return self.run.status if self.run else NOT_RUN

    @property
    def scale(self) -> Scale | None:
        """Return the size of the run's model: the row's, tiny, or another one by --set."""
        row, run = self.row.recipe, self.run
        if run is None:
            return None
        if run.tiny:
            return "tiny"
        if row is None or run.recipe is None:
            return "unknown"
        changed = any(key.startswith(OTHER_MODEL) for key in changed_work(row, run.recipe))
        return "other" if changed else "full"

    @property
    def ratios(self) -> dict[str, float]:
        """Return measured / published by quantity."""
        return {each.quantity: each.ratio for each in self.compared if each.ratio is not None}

    @property
    def no_ratio(self) -> str | None:
        """Return why there are no ratios; None with ratios, or with nothing to compare with."""
        return f"not compared: {self.incomparable}" if self.incomparable else self.memory

    @property
    def outcome(self) -> str:
        """Return the ratios as text, or why there are none; empty where nothing was published."""
        said = [f"{RATIO_NAMES[key]} {numbers.ratio(value)}" for key, value in self.ratios.items()]
        published, run = self.row.published, self.run
        validation = run.result.losses.validation if run else None
        # No ratio: the held-out text differs, and the vocabulary may differ.
        if published and published.validation_loss is not None and validation:
            measured = numbers.loss((validation.parts or {}).get("mlm_loss", validation.loss))
            here = f"validation loss {measured} here, {published.validation_loss:g} published"
            said.append(f"{here} (each on its own held-out text)")
        return self.no_ratio or ", ".join(said)

    @property
    def deviations(self) -> list[Deviation]:
        """Return the deviations that the run stated, and changes of the table since."""
        stated = list(self.run.result.deviations) if self.run else []
        row, run = self.row.recipe, self.run and self.run.recipe
        if row and run and row.published != run.published:
            stated.append(Deviation("republished"))
        return stated


def measured_columns(table: PublishedTable, runs: Sequence[Run]) -> list[Column]:
    """Return the columns of MEASURED with a value in any run; mark the TFLOPS counted as published."""
    published = [row.published for row in table.rows if row.published]
    counted = {TFLOPS_BY[each.tflops_by][1] for each in published if each.tflops}
    return [
        replace(column, heading=f"{column.heading} (as published)") if column.key in counted else column
        for column in MEASURED
        if any(column.of(run.result) is not None for run in runs)
    ]


def entries_of(table: PublishedTable, runs: Sequence[Run]) -> list[Entry]:
    """Return the entries of every row in table order, runs newest first."""
    found = []
    newest_first = sorted(runs, key=lambda run: run.started.timestamp() if run.started else 0.0, reverse=True)
    for row in table.rows:
        found += [entry_of(row, run) for run in newest_first if run.name == row.full_name] or [Entry(row)]
    return found


def entry_of(row: PublishedRow, run: Run) -> Entry:
    """Compare the run with the published numbers of its row."""
    if row.published is None:
        return Entry(row, run)
    if why := not_comparable(row.recipe, run.plan, tiny=run.tiny, emulated_fp16=run.result.emulated_fp16):
        return Entry(row, run, incomparable=why)
    if run.status == OOM:
        how = "as published" if row.published.oom else "published as running"
        return Entry(row, run, memory=f"OOM, {how}")
    if row.published.oom:
        return Entry(row, run, memory=f"published as OOM; this run: {run.status}")
    return Entry(row, run, compare_with(row.published, run.result, comparable=True))
