"""A report as data: what Markdown, CSV and the page are all written from."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from launch.reports import figures
from launch.reports.comparison import MOST_COMPARED, Comparison, compare
from launch.reports.drawing import Figure
from launch.reports.entries import Column, Entry, entries_of, measured_columns
from launch.reports.remarks import Remarks, split_remarks
from launch.reports.runs import Run
from launch.reports.tables import Published, Row, Tables
from recipes.problems import ProblemsError

ELSEWHERE = "other-recipes"


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        columns: measured ones, none where nothing was run.
        common: what all rows say of themselves; remarks: what each says besides that.
    """

    table: Published
    entries: tuple[Entry, ...]
    columns: tuple[Column, ...]
    common: Remarks
    remarks: tuple[Remarks, ...]
    figures: tuple[Figure, ...]

    @property
    def anchor(self) -> str:
        """The name of the table as an id: a user's file may be called anything."""
        return re.sub(r"[^A-Za-z0-9_]+", "-", self.table.name)

    @property
    def with_errata(self) -> dict[str, str]:
        """Full name of each row that has errata -> id of the place where they are."""
        found = enumerate(self.remarks)
        return {
            each.row.full_name: f"errata-{self.anchor}-{n}" for n, each in found if each.row and each.errata
        }

    @property
    def runs(self) -> list[Run]:
        return [entry.run for entry in self.entries if entry.run]

    @property
    def groups(self) -> list[tuple[Row, list[Entry]]]:
        """The entries of each row."""
        return [(row, list(entries)) for row, entries in groupby(self.entries, key=lambda entry: entry.row)]

    @property
    def summary(self) -> str:
        """How many rows there are, and how many have been run at full size and tiny."""
        full = len({entry.row.name for entry in self.entries if entry.run and not entry.run.tiny})
        tiny = len({entry.row.name for entry in self.entries if entry.run and entry.run.tiny})
        rows = len(self.table.rows)
        counts = [f"{count} run {how}" for count, how in ((full, "at full size"), (tiny, "tiny")) if count]
        return f"{rows} row{'s' if rows != 1 else ''}, {', '.join(counts) or 'nothing run'}"


@dataclass(frozen=True)
class Document:
    """A whole report. `problems`: what could not be read; `notes`: what was left out, and why."""

    title: str
    made: str
    sections: tuple[Section, ...]
    comparison: Comparison | None
    comparison_figures: tuple[Figure, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def assemble(
    tables: Tables,
    names: Sequence[str],
    runs: Sequence[Run],
    *,
    only_named: bool,
    problems: Sequence[str] = (),
) -> Document:
    """The report of `runs` and of the tables `names`.

    With `only_named`, runs of other tables are left out; otherwise their tables are reported too, and runs
    whose recipe is in no table of `recipes/` come in one of their own.
    """
    problems, notes = list(problems), []
    names = list(dict.fromkeys((*names, *(() if only_named else sorted({run.table for run in runs})))))
    shown = [run for run in runs if run.table in names]
    if left_out := len(runs) - len(shown):
        notes.append(f"{left_out} run{'s' if left_out > 1 else ''} of other tables left out (--table)")
    if len(shown) > MOST_COMPARED:
        notes.append(
            f"{len(shown)} runs are too many to compare side by side: name 2 to {MOST_COMPARED} of them"
        )
    comparison = compare(shown) if 2 <= len(shown) <= MOST_COMPARED else None
    sections, strangers = [], []
    for name in names:
        try:
            found = tables.get(name)
        except ProblemsError as error:
            problems += [str(problem) for problem in error.problems]
            found = None
        own = [run for run in shown if run.table == name]
        if found:
            sections.append(section(found, own, draw_losses=comparison is None))
        strangers += [run for run in own if not (found and found.row(run.name.rpartition("/")[2]))]
    if strangers:
        sections.append(section(_elsewhere(strangers), strangers, draw_losses=comparison is None))
    problems += [problem for each in sections for problem in each.table.problems]
    problems += [problem for run in runs for problem in run.problems]
    return Document(
        title=_title(sections, comparison),
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        sections=tuple(sections),
        comparison=comparison,
        comparison_figures=_comparison_figures(comparison) if comparison else (),
        problems=tuple(dict.fromkeys(problems)),
        notes=tuple(notes),
    )


def section(table: Published, runs: Sequence[Run], *, draw_losses: bool) -> Section:
    """`draw_losses`: not where the comparison draws them already."""
    entries = tuple(entries_of(table, runs))
    shown = [entry.run for entry in entries if entry.run]
    columns = (
        column for column in measured_columns(table) if any(column.value(run) is not None for run in shown)
    )
    drawn = (*figures.throughput(entries), *(figures.losses(shown) if draw_losses else []))
    return Section(table, entries, tuple(columns), *split_remarks(table.rows), drawn)


def _elsewhere(runs: Sequence[Run]) -> Published:
    """Runs of a user's own recipe file, or of a row that is no longer in its table."""
    rows = []
    for name, run in {run.name: run for run in runs}.items():
        table, _, row = name.rpartition("/")
        title = (run.recipe.title if run.recipe else run.result.title) or name
        rows.append(Row(table, row, title, (title,), run.recipe))
    note = "Rows of the user's own files; their titles are those of the runs."
    return Published(
        ELSEWHERE, "Recipes that are in no table of recipes/", None, note, ("Recipe",), tuple(rows)
    )


def _comparison_figures(comparison: Comparison) -> tuple[Figure, ...]:
    first, *others = comparison.runs
    return (
        *figures.losses(comparison.runs, "Losses"),
        *figures.loss_differences(first, others),
        *figures.step_times(comparison.runs),
    )


def _title(sections: Sequence[Section], comparison: Comparison | None) -> str:
    if comparison and len(comparison.runs) == 2:
        return " and ".join(run.label for run in comparison.runs)
    return "Published and measured" + (f": {sections[0].table.title}" if len(sections) == 1 else "")
