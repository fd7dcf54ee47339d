"""A report as data, the common source of the CSV and HTML files."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from launch.reports import plots, scores
from launch.reports.comparison import MOST_COMPARED, Comparison, compare
from launch.reports.entries import (
    Column,
    EntryRemark,
    RowEntry,
    Scale,
    entries_of,
    entry_of,
    measured_columns,
    remarks_of,
)
from launch.reports.frames import ReportTable
from launch.reports.plots import Plot
from launch.reports.runs import Over, ReportedRun
from launch.reports.scores import FinetunedLine
from launch.reports.tables import PublishedRow, PublishedTable, Tables
from recipes.problems import ProblemsError, counted

ELSEWHERE = "other-recipes"
# `Entry.scale` -> words after a count of such runs.
SCALES: dict[Scale, str] = {
    "full": "at full size",
    "other": "of another model (--set)",
    "tiny": "tiny",
    "unknown": "whose recipe cannot be read",
}


@dataclass(frozen=True)
class Section:
    """One table of the report.

    Attributes:
        columns: measured quantities; empty without runs.
        remarks: of each row that has some.
        finetuned: fine-tuning scores, published by the rows and measured here from their weights.
    """

    table: PublishedTable
    entries: list[RowEntry]
    columns: list[Column]
    remarks: list[tuple[PublishedRow, list[EntryRemark]]]
    plots: list[Plot]
    finetuned: list[FinetunedLine]

    @property
    def finetuned_frame(self) -> ReportTable | None:
        return scores.finetuned_frame(self.finetuned)

    @property
    def anchor(self) -> str:
        """Return the table's name as an HTML id; a user's file may have any name."""
        return re.sub(r"[^A-Za-z0-9_]+", "-", self.table.name)

    @property
    def errata_ids(self) -> dict[str, str]:
        """Map the full name of each row with errata to the HTML id of these errata."""
        numbered = enumerate(row for row in self.table.rows if row.errata)
        return {row.full_name: f"errata-{self.anchor}-{n}" for n, row in numbered}

    @property
    def runs(self) -> list[ReportedRun]:
        return [entry.run for entry in self.entries if entry.run]

    @property
    def listed(self) -> list[tuple[PublishedRow, list[RowEntry]]]:
        """Group the entries by row, in table order: the rows of a document, of other tables those not run."""
        found = []
        for row in self.table.rows:
            own = [entry for entry in self.entries if entry.row == row]
            if self.table.source or not own[0].run:
                found.append((row, own))
        return found

    @property
    def summary(self) -> str:
        """Count the rows, and the runs by size, in words."""
        scales = Counter(entry.scale for entry in self.entries)
        counts = [
            f"{counted(scales[scale], 'run')} {how}"
            for scale, how in SCALES.items()
            if scales[scale]
        ]
        return f"{counted(len(self.table.rows), 'row')}, {', '.join(counts) or 'nothing run'}"


@dataclass(frozen=True)
class ReportDocument:
    """A whole report.

    Attributes:
        notes: omissions and their reasons.
        scores: of runs, published models, and fine-tuned models without a row.
    """

    title: str
    made: str
    sections: list[Section]
    comparison: Comparison | None
    comparison_plots: list[Plot]
    problems: list[str]
    notes: list[str]
    scores: ReportTable | None
    runs: Sequence[ReportedRun]


def assemble(
    tables: Tables,
    names: Sequence[str],
    runs: Sequence[ReportedRun],
    *,
    only_named: bool,
    over: Over = "steps",
) -> ReportDocument:
    """Assemble the report of `runs` and of the tables `names`.

    With `only_named`, runs of other tables are left out. Otherwise their tables are reported too; runs whose
    recipe is in no table of `recipes/` get an own table.
    """
    problems: list[str] = []
    notes: list[str] = []
    tuned = scores.finetuned_models(runs, problems)
    asked = names
    if not only_named:
        # "" of a run whose files do not name its recipe
        of_runs = {run.table for run in runs}
        of_runs |= {run.pretrained_table for run in runs if run.pretrained_table}
        names = [*names, *sorted(of_runs)]
    names = list(dict.fromkeys(names))
    shown = [run for run in runs if run.table in names]
    left_out = sum(not {run.table, run.pretrained_table} & {*names} for run in runs)
    if left_out:
        notes.append(f"{counted(left_out, 'run')} of other tables left out (--table)")
    if len(shown) > MOST_COMPARED:
        many = f"{len(shown)} runs are too many to compare side by side"
        notes.append(f"{many}: name 2 to {MOST_COMPARED} of them")
    comparison = compare(shown) if 2 <= len(shown) <= MOST_COMPARED else None

    def section(table: PublishedTable, entries: list[RowEntry]) -> Section:
        ran = [entry.run for entry in entries if entry.run]
        remarks = [(row, remarks_of(row)) for row in table.rows]
        drawn = plots.of_runs(ran)
        if comparison is None:  # which draws the losses
            drawn += plots.losses(ran, over)
        return Section(
            table,
            entries,
            measured_columns(table, ran),
            [each for each in remarks if each[1]],
            drawn,
            list(scores.finetuned_lines(table.rows, tuned, tables.recipe)),
        )

    sections = []
    for table in _read(tables, names, problems):
        made = section(table, entries_of(table, shown))
        if made.runs or made.finetuned or table.name in asked:
            sections.append(made)
    sections.sort(key=lambda each: not each.runs)
    placed = [run for each in sections for run in each.runs]
    strangers = [run for run in shown if run not in placed]
    if strangers:
        table = _table_of_strangers(strangers)
        pairs = zip(table.rows, strangers, strict=True)
        sections.insert(0, section(table, [entry_of(*pair) for pair in pairs]))
    problems += [str(problem) for each in sections for problem in each.table.problems]
    problems += [problem for run in runs for problem in run.problems]
    drawn = plots.losses(comparison.runs, over) if comparison else []
    in_rows = [line.finetuned for each in sections for line in each.finetuned]
    return ReportDocument(
        _title(sections, comparison),
        time.strftime("%Y-%m-%d %H:%M %Z"),
        sections,
        comparison,
        drawn,
        list(dict.fromkeys(problems)),
        notes,
        scores.frame(shown, [each for each in tuned if each not in in_rows]),
        runs,
    )


def _read(
    tables: Tables, names: Sequence[str], problems: list[str]
) -> list[PublishedTable]:
    """Read the tables that there are; add what is wrong with others to `problems`."""
    found = []
    for name in names:
        try:
            found.append(tables.get(name))
        except ProblemsError as error:
            problems += map(str, error.problems)
    return [table for table in found if table]


def _title(sections: Sequence[Section], comparison: Comparison | None) -> str:
    if comparison and len(comparison.runs) == 2:
        return " and ".join(run.label for run in comparison.runs)
    of_table = f": {sections[0].table.title}" if len(sections) == 1 else ""
    return f"Published and measured{of_table}"


def _table_of_strangers(runs: Sequence[ReportedRun]) -> PublishedTable:
    """Make a table of the runs that no table has a row for, a row for each."""
    rows = []
    for run in runs:
        table, _, row = run.name.rpartition("/")
        rows.append(PublishedRow(table, row, (run.title or run.name,), run.recipe))
    note = "Runs of own recipes, on own text, or of another model than the row whose settings they took."
    title = "Runs that are no row of a table"
    return PublishedTable(ELSEWHERE, title, None, note, ("Trained",), rows)
