"""A report as data: what Markdown, CSV and the page are all written from."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from launch.reports import figures
from launch.reports.comparing import MOST_COMPARED, Comparison, compare
from launch.reports.figures import Figure
from launch.reports.runs import Run
from launch.reports.table_lines import (
    Column,
    Line,
    Remarks,
    deviations_of,
    kinds_of,
    lines_of,
    measured_columns,
    split_remarks,
)
from launch.reports.tables import Published, Row, Tables
from recipes.problems import ProblemsError

ELSEWHERE = "other-recipes"


@dataclass(frozen=True)
class Section:
    """One table. `columns`: of ours, none where nothing was run; `common`: what all rows say of themselves, `remarks`: what each says."""

    table: Published
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    common: tuple[tuple[str, str], ...]
    remarks: tuple[Remarks, ...]
    deviations: tuple[tuple[Run, tuple[str, ...]], ...]
    figures: tuple[Figure, ...]

    @property
    def anchor(self) -> str:
        """The name of the table as an id: a user's file may be called anything."""
        return re.sub(r"[^A-Za-z0-9_]+", "-", self.table.name)

    @property
    def common_kinds(self) -> str:
        return kinds_of(self.common)

    @property
    def with_errata(self) -> dict[str, str]:
        """Full name of each row that has errata -> id of the place where they are."""
        return {
            each.row.full_name: f"errata-{self.anchor}-{n}"
            for n, each in enumerate(self.remarks)
            if each.errata
        }

    @property
    def runs(self) -> list[Run]:
        return [line.run for line in self.lines if line.run]

    @property
    def groups(self) -> list[tuple[Row, list[Line]]]:
        """The lines of each row."""
        return [(row, list(lines)) for row, lines in groupby(self.lines, key=lambda line: line.row)]

    @property
    def summary(self) -> str:
        """How many rows there are, and how many have been run at full size and tiny."""
        full = len({line.row.name for line in self.lines if line.run and not line.run.tiny})
        tiny = len({line.row.name for line in self.lines if line.run and line.run.tiny})
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
    runs: tuple[Run, ...]
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

    With `only_named`, runs of other tables are left out; otherwise their tables are reported too, and runs whose recipe is in no table
    of `recipes/` come in one of their own.
    """
    problems, notes = list(problems), []
    names = list(dict.fromkeys((*names, *(() if only_named else sorted({run.table for run in runs})))))
    shown = [run for run in runs if run.table in names]
    if left_out := len(runs) - len(shown):
        notes.append(f"{left_out} run{'s' if left_out > 1 else ''} of other tables left out (--table)")
    comparison = _comparison(shown, notes)
    known, strangers = [], []
    for name in names:
        try:
            found = tables.get(name)
        except ProblemsError as error:
            problems += map(str, error.problems)
            found = None
        own = [run for run in shown if run.table == name]
        if found:
            known.append(section(found, own, comparison is None))
            strangers += [run for run in own if found.row(run.name.rpartition("/")[2]) is None]
        else:
            strangers += own
    if strangers:
        known.append(section(_elsewhere(strangers), strangers, comparison is None))
    problems += [problem for each in known for problem in each.table.problems] + [
        problem for run in runs for problem in run.problems
    ]
    return Document(
        _title(known, comparison), time.strftime("%Y-%m-%d %H:%M %Z"), tuple(known), comparison,
        _comparison_figures(comparison) if comparison else (), tuple(shown), tuple(dict.fromkeys(problems)), tuple(notes),
    )  # fmt: skip


def section(table: Published, runs: Sequence[Run], draw_losses: bool) -> Section:
    """`draw_losses`: not where the comparison draws them already."""
    lines = lines_of(table, runs)
    shown = [line.run for line in lines if line.run]
    common, remarks = split_remarks(table.rows)
    deviations = [(line.run, tuple(deviations_of(line.run, line.row))) for line in lines if line.run]
    columns = tuple(
        column for column in measured_columns(table) if any(column.value(run) is not None for run in shown)
    )
    made = Section(table, tuple(lines), columns, common, remarks, tuple(deviations), ())
    drawn = figures.throughput(lines, f"t-{made.anchor}") + (
        figures.losses(shown, f"l-{made.anchor}") if draw_losses else []
    )
    return replace(made, figures=tuple(drawn))


def _elsewhere(runs: Sequence[Run]) -> Published:
    """Runs of a user's own recipe file, or of a row that is no longer in its table."""
    by_name = {run.name: run for run in runs}
    rows = []
    for name, run in by_name.items():
        title = run.recipe.title if run.recipe else str(run.row.get("title") or name)
        table, _, row = name.rpartition("/")
        rows.append(Row(table, row, title, (title,), run.recipe))
    return Published(
        ELSEWHERE, "Recipes that are in no table of recipes/", None, "Rows of the user's own files; their titles are those of the runs.",
        ("Recipe",), tuple(rows),
    )  # fmt: skip


def _comparison(runs: Sequence[Run], notes: list[str]) -> Comparison | None:
    if len(runs) > MOST_COMPARED:
        notes.append(
            f"{len(runs)} runs are too many to compare side by side: name 2 to {MOST_COMPARED} of them"
        )
    return compare(runs) if 2 <= len(runs) <= MOST_COMPARED else None


def _comparison_figures(comparison: Comparison) -> tuple[Figure, ...]:
    first, *others = comparison.runs
    return (
        *figures.losses(comparison.runs, "c-loss", "Losses"),
        *figures.loss_differences(first, others, "c-difference"),
        *figures.step_times(comparison.runs, "c-time"),
    )


def _title(sections: Sequence[Section], comparison: Comparison | None) -> str:
    if comparison and len(comparison.runs) == 2:
        return " and ".join(run.label for run in comparison.runs)
    return "Published and measured" + (f": {sections[0].table.title}" if len(sections) == 1 else "")
