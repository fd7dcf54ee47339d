"""The lines of a table: each row beside the runs of its recipe, or beside "not run"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launch.planning.comparability import not_comparable
from launch.reports import numbers
from launch.reports.runs import Run, newest_first
from launch.reports.tables import Published, Row
from launch.runs import result

NOT_RUN = "not run"
DAGGER = "†"  # of a row that has errata
# Quantity -> what an erratum of its number begins with: it is wrong, or computed from what is wrong.
WRONG_BY = {
    "tflops": ("TFLOPS", "time", "GPUs", "global batch"), "samples_per_s": ("samples", "time", "global batch"),
    "time_per_iteration_s": ("time", "GPUs", "global batch"),
}  # fmt: skip
RATIO_NAMES = {
    "time_per_iteration_s": "time", "samples_per_s": "samples/s", "tflops": "TFLOPS", "cached_gb": "cached", "parameters": "parameters",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A measured column. `key`: in the CSV; `heading` with its unit, for people; `source`: key of `Run.row`."""

    key: str
    heading: str
    source: str

    def value(self, run: Run) -> Any:
        value = run.row.get(self.source)
        return numbers.gigabytes(value) if self.key.endswith("_gb") else value

    def text(self, run: Run) -> str:
        return (numbers.loss if self.key.endswith("_loss") else numbers.number)(self.value(run))


MEASURED = (
    Column("steps", "steps", "steps"),
    Column("time_per_iteration_s", "time per iteration (s)", "seconds_per_step"),
    Column("samples_per_s", "samples/s", "samples_per_s"),
    Column("tflops", "TFLOPS per GPU, formula", "tflops"),
    Column("exact_tflops", "TFLOPS per GPU, exact count", "exact_tflops"),
    Column("cached_gb", "cached per GPU (GB)", "cached_bytes"),
    Column("parameters", "parameters", "parameters"),
    Column("validation_loss", "validation loss (nats per token)", "validation_loss"),
)


@dataclass(frozen=True)
class Line:
    """A row and one run of it; `run` None: not run. `ratios`: measured / published by quantity; `no_ratio`: why there are none;
    `loss`: the validation loss beside a published one.
    """

    row: Row
    run: Run | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    no_ratio: str | None = None
    loss: str | None = None

    @property
    def status(self) -> str:
        return self.run.status if self.run else NOT_RUN

    @property
    def outcome(self) -> str:
        """The ratios as text, or why there are none; empty where nothing was published to compare with."""
        ratios = [f"{RATIO_NAMES.get(key, key)} {numbers.ratio(value)}" for key, value in self.ratios.items()]
        return self.no_ratio or ", ".join([*ratios, *([self.loss] if self.loss else [])])


@dataclass(frozen=True)
class Remarks:
    """What a recipe says about itself beside its numbers; `lines`: (what it is, text)."""

    row: Row
    lines: tuple[tuple[str, str], ...]
    errata: int = 0

    @property
    def kinds(self) -> str:
        return kinds_of(self.lines)


def is_wrong(row: Row, quantity: str) -> bool:
    """Whether an erratum says that the published number is wrong."""
    return any(text.startswith(WRONG_BY[quantity]) for text in row.errata)


def measured_columns(table: Published) -> tuple[Column, ...]:
    """MEASURED, with the count of TFLOPS named that stands beside the published ones."""
    found = {
        row.recipe.published.tflops_by
        for row in table.rows
        if row.recipe and row.recipe.published and row.recipe.published.tflops
    }
    counted = [result.TFLOPS_BY[by][1] for by in found]
    return tuple(
        replace(column, heading=f"{column.heading} (as published)") if column.key in counted else column
        for column in MEASURED
    )


def lines_of(table: Published, runs: Sequence[Run]) -> list[Line]:
    """Every row in the order of the table, each with its runs, newest first."""
    found = []
    for row in table.rows:
        own = newest_first([run for run in runs if run.name == row.full_name])
        found += [compared(row, run) for run in own] or [Line(row)]
    return found


def compared(row: Row, run: Run) -> Line:
    published = row.recipe.published if row.recipe else None
    if published is None:
        return Line(row, run)
    why = not_comparable(
        row.recipe, run.recipe, tiny=run.tiny, precision=str(run.row.get("precision")), layout=run.row.get("layout"),
        ds_name=run.row.get("ds_config"), ds=run.ds_config,
    )  # fmt: skip
    if why:
        return Line(row, run, no_ratio=f"not compared: {why}")
    if published.oom or run.status == "OOM":
        return Line(row, run, no_ratio=_memory_outcome(published.oom, run.status))
    ratios = {
        entry["quantity"]: entry["ratio"]
        for entry in result.comparison(published, run.row)
        if entry["ratio"] is not None
    }
    return Line(row, run, ratios, loss=_beside_published_loss(published.validation_loss, run))


def remarks_of(row: Row) -> Remarks:
    """Errata, note, printed values that cannot be, what no source gives, and where the rest comes from."""
    wrong = [("erratum", text) for text in row.errata]
    if row.recipe is None:
        return Remarks(row, tuple(wrong), len(wrong))
    recipe, published = row.recipe, row.recipe.published
    lines = [
        *wrong,
        *(
            [("TFLOPS counted", result.EXACT)]
            if published and published.tflops and published.tflops_by == "exact"
            else []
        ),
        *([("note", " ".join(recipe.note.split()))] if recipe.note else []),
        *(
            (f"{key} printed as", str(value))
            for key, value in (published.printed if published else {}).items()
        ),
        *((f"differs: {key}", text) for key, text in recipe.differs.items()),
        *((f"unknown: {key}", text) for key, text in recipe.unknown.items()),
        *((f"inferred: {key}", text) for key, text in recipe.inferred.items()),
    ]
    return Remarks(row, tuple(lines), len(wrong))


def split_remarks(rows: Sequence[Row]) -> tuple[tuple[tuple[str, str], ...], tuple[Remarks, ...]]:
    """(what all of several rows say, what each says beside that): a table's defaults are read once."""
    every = [remarks_of(row) for row in rows]
    shared = (
        [line for line in every[0].lines if all(line in remarks.lines for remarks in every)]
        if len(every) > 1
        else []
    )
    common = [line for line in shared if line[0] != "erratum"]  # each row's mark leads to its own
    own = [
        replace(remarks, lines=tuple(line for line in remarks.lines if line not in common))
        for remarks in every
    ]
    return tuple(common), tuple(remarks for remarks in own if remarks.lines)


def kinds_of(lines: Sequence[tuple[str, str]]) -> str:
    """What the remarks are about: "note; unknown: steps; inferred: optimizer, schedule"."""
    keys: dict[str, list[str]] = {}
    for what, _ in lines:
        kind, _, key = what.partition(": ")
        keys.setdefault(kind, []).extend([key] if key else [])
    return "; ".join(
        f"{kind}: {', '.join(dict.fromkeys(found))}" if found else kind for kind, found in keys.items()
    )


def deviations_of(run: Run, row: Row | None) -> list[str]:
    """What the run itself stated, and what has changed in the table since."""
    found = list(run.deviations)
    if row and row.recipe and run.recipe and run.recipe.published != row.recipe.published:
        found.append(
            "published numbers: the table has changed since this run; ratios are to the numbers shown here"
        )
    return found


def _memory_outcome(published: bool, status: str) -> str:
    if published:
        return "OOM, as published" if status == "OOM" else f"published as OOM; this run: {status}"
    return "OOM, published as running"


def _beside_published_loss(published: float | None, run: Run) -> str | None:
    """No ratio: the held-out text is another, and so may be the vocabulary."""
    parts = run.row.get("validation_parts") or {}
    measured = parts.get("mlm_loss", run.row.get("validation_loss"))
    if published is None or measured is None:
        return None
    return f"validation loss {numbers.loss(measured)} here, {published:g} published (each on its own held-out text)"
