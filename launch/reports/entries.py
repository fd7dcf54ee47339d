"""Entries of a table in a report: each row with the runs of its recipe, or "not run", and its remarks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from launch.console.text_table import gigabytes, loss, number, ratio
from launch.records.deviations import Deviation, changed_work, not_comparable
from launch.records.result import TFLOPS_BY, ComparedQuantity, Result, compare_with
from launch.records.result_text import EXACT
from launch.records.titles import texts
from launch.reports.runs import OOM, ReportedRun
from launch.reports.tables import PublishedRow, PublishedTable
from recipes.families import LossFigure
from recipes.schema import Recipe
from recipes.tiny import tiny

# size of a run compared with its row
Scale = Literal["full", "tiny", "other", "unknown"]
NOT_RUN = "not run"
NO_RECIPE = "no recipe"  # of a line about a model that this project cannot train
# prefixes of keys; a change makes another model
OTHER_MODEL = ("model.", "sequence_length")
RATIO_NAMES = {
    "time_per_iteration_s": "time",
    "samples_per_s": "samples/s",
    "tflops": "TFLOPS",
    "cached_gb": "cached",
    "parameters": "parameters",
}


class Column(NamedTuple):
    """A measured quantity.

    Attributes:
        key: its name in the CSV.
        heading: with the unit.
        change: comparison of two runs, by difference or ratio; losses by difference where comparable.
    """

    key: str
    heading: str
    of: Callable[[Result], Any]
    change: Literal["difference", "ratio", "loss", "none"] = "ratio"

    def text(self, run: ReportedRun) -> str:
        """Write the value of a run."""
        value = self.of(run.result)
        return loss(value) if self.change == "loss" else number(value)


def spread(result: Result) -> str:
    """Write between which seconds half of the steps lie; "" for too few steps."""
    if result.speed.quartiles_s is None:
        return ""
    return " to ".join(map(number, result.speed.quartiles_s))


# Shown where runs are compared, the losses between the counts and the others.
COUNTS = (
    Column("steps", "steps", lambda r: r.steps, "difference"),
    Column("skipped_steps", "skipped steps", lambda r: r.skipped_steps, "difference"),
)
# splits of a result -> in names of columns
SPLITS = {"training": "train", "validation": "validation", "test": "test"}
QUANTITIES = (
    Column(
        "time_per_iteration_s",
        "time per iteration (s)",
        lambda r: r.speed.seconds_per_step,
    ),
    Column(
        "data_wait",
        "waiting for data (share)",
        lambda r: r.speed.data_wait_share,
        "difference",
    ),
    Column("samples_per_s", "samples/s", lambda r: r.speed.samples_per_s),
    Column("tokens_per_s", "tokens/s", lambda r: r.speed.tokens_per_s),
    Column("tflops", "TFLOPS per GPU, formula", lambda r: r.speed.tflops),
    Column(
        "exact_tflops", "TFLOPS per GPU, exact count", lambda r: r.speed.exact_tflops
    ),
    Column("peak_gb", "peak memory (GB)", lambda r: gigabytes(r.memory.peak_bytes)),
    Column(
        "cached_gb", "cached per GPU (GB)", lambda r: gigabytes(r.memory.cached_bytes)
    ),
    Column("parameters", "parameters", lambda r: r.parameters),
    Column("judgement", "next to its recipe's curve", lambda r: r.judgement, "none"),
)
COLUMNS = {column.key: column for column in (*COUNTS, *QUANTITIES)}
TIME = "time_per_iteration_s"
PEAK = "peak_gb"
RATES = ("samples_per_s", "tokens_per_s", "tflops", "exact_tflops")
# Shown next to published rows, and in the CSV.
_MEASURED_KEYS = (
    "steps",
    "time_per_iteration_s",
    "samples_per_s",
    "tflops",
    "exact_tflops",
    "cached_gb",
    "parameters",
    "judgement",
)
MEASURED = tuple(COLUMNS[key] for key in _MEASURED_KEYS)


def loss_columns(split: str, figures: Iterable[LossFigure]) -> Iterator[Column]:
    """Yield a column for each different figure of a split, empty for results without it."""
    over = ", last 10 steps" if split == "training" else ""
    for figure in dict.fromkeys(figures):
        heading = f"{split} {figure.name} ({figure.unit}{over})"
        of = partial(Result.told, split=split, figure=figure)
        yield Column(f"{SPLITS[split]}_{figure.key}", heading, of, "loss")


@dataclass(frozen=True)
class RowEntry:
    """A row without a run, or with one.

    Attributes:
        compared: the run's numbers next to the published ones; empty where nothing was published.
        no_ratio: why there are no ratios; None with ratios, or with nothing to compare with.
    """

    row: PublishedRow
    run: ReportedRun | None = None
    compared: tuple[ComparedQuantity, ...] = ()
    no_ratio: str | None = None

    @property
    def status(self) -> str:
        if self.row.no_recipe:
            return NO_RECIPE
        return self.run.status if self.run else NOT_RUN

    @property
    def scale(self) -> Scale | None:
        """Return the size of the run's model: the row's, tiny, or another one by --set."""
        row = self.row.recipe
        run = self.run
        if run is None:
            return None
        if run.tiny:
            return "tiny"
        if row is None or run.recipe is None:
            return "unknown"
        return "other" if of_another_model(row, run.recipe) else "full"

    @property
    def ratios(self) -> dict[str, float]:
        """Return measured / published by quantity."""
        return {
            each.quantity: each.ratio
            for each in self.compared
            if each.ratio is not None
        }

    @property
    def outcome(self) -> str:
        """Return the ratios as text, or why there are none; empty where nothing was published."""
        said = [
            f"{RATIO_NAMES[key]} {ratio(value)}" for key, value in self.ratios.items()
        ]
        published = self.row.published
        run = self.run
        validation = run and run.result.losses.validation
        # No ratio: the held-out text differs, and the vocabulary may differ.
        printed = published and published.validation_loss
        if run and validation and printed:
            figure = run.result.figures[0]
            here = f"validation {figure.name} {loss(figure.of(validation))} here"
            there = f"{printed:g} published (each on its own held-out text)"
            said.append(f"{here}, {there}")
        return self.no_ratio or ", ".join(said)

    @property
    def deviations(self) -> list[Deviation]:
        """Return the deviations that the run stated, and changes of the table since."""
        stated = list(self.run.result.deviations) if self.run else []
        row = self.row.recipe
        run = self.run and self.run.recipe
        if row and run and row.published != run.published:
            stated.append(Deviation("republished"))
        return stated


def measured_columns(
    table: PublishedTable, runs: Sequence[ReportedRun]
) -> list[Column]:
    """Return the columns with a value in any run; mark the TFLOPS counted as published."""
    published = [row.published for row in table.rows if row.published]
    counted = {TFLOPS_BY[each.tflops_by][1] for each in published if each.tflops}
    columns = []
    firsts = [run.result.figures[0] for run in runs]
    for column in (*loss_columns("validation", firsts), *MEASURED):
        if column.key in counted:
            column = column._replace(heading=f"{column.heading} (as published)")
        if any(column.of(run.result) is not None for run in runs):
            columns.append(column)
    return columns


def is_of_row(row: PublishedRow, run: ReportedRun) -> bool:
    """Check that a run is of a row: of one that publishes nothing, it has the model and the text, too."""
    if run.name != row.full_name:
        return False
    if row.published or row.recipe is None or run.recipe is None:
        return True
    recipe = tiny(row.recipe) if run.tiny else row.recipe
    same_text = texts(recipe.data) == texts(run.recipe.data)
    return same_text and not of_another_model(recipe, run.recipe)


def of_another_model(row: Recipe, run: Recipe) -> bool:
    return any(key.startswith(OTHER_MODEL) for key in changed_work(row, run))


def begun(run: ReportedRun) -> float:
    return run.started.timestamp() if run.started else 0.0


def entries_of(table: PublishedTable, runs: Sequence[ReportedRun]) -> list[RowEntry]:
    """Return the entries of every row in table order, those with runs first, and the newest run first."""
    entries = []
    newest_first = sorted(runs, key=begun, reverse=True)
    for row in table.rows:
        own = [entry_of(row, run) for run in newest_first if is_of_row(row, run)]
        entries += own or [RowEntry(row)]
    return sorted(entries, key=lambda entry: entry.run is None)


def entry_of(row: PublishedRow, run: ReportedRun) -> RowEntry:
    """Compare the run with the published numbers of its row."""
    published = row.published
    if published is None:
        return RowEntry(row, run)
    why_not = not_comparable(
        row.recipe, run.plan, tiny=run.tiny, emulated_fp16=run.result.emulated_fp16
    )
    if why_not:
        why = f"not compared: {why_not}"
    elif run.status == OOM:
        why = "OOM, as published" if published.oom else "OOM, published as running"
    elif published.oom:
        why = f"published as OOM; this run: {run.status}"
    else:
        return RowEntry(row, run, compare_with(published, run.result, comparable=True))
    return RowEntry(row, run, no_ratio=why)


class EntryRemark(NamedTuple):
    """A sentence about a row. `kind`: "erratum", "note", ...; `key`: the recipe's key, if there is one."""

    kind: str
    text: str
    key: str = ""


def remarks_of(row: PublishedRow) -> list[EntryRemark]:
    """Return errata, note, impossible printed values, unknown values, and origins of inferred values."""
    remarks = [EntryRemark("erratum", str(known)) for known in row.errata]
    if row.no_recipe:
        remarks.append(EntryRemark("no recipe", row.no_recipe))
    recipe = row.recipe
    if recipe is None:
        return remarks
    published = recipe.published
    if published and published.tflops and published.tflops_by == "exact":
        remarks.append(EntryRemark("TFLOPS counted", EXACT))
    if recipe.note:
        remarks.append(EntryRemark("note", " ".join(recipe.note.split())))
    printed = published.printed if published else {}
    remarks += [
        EntryRemark(f"{key} printed as", str(value)) for key, value in printed.items()
    ]
    for kind in ("differs", "unknown", "inferred"):
        remarks += [
            EntryRemark(kind, text, key) for key, text in getattr(recipe, kind).items()
        ]
    return remarks
