"""A report as Markdown with tables, footnotes and no plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from launch.reports.comparison import Comparison
from launch.reports.comparison import Row as Difference
from launch.reports.document import Document, Section
from launch.reports.entries import Entry
from launch.reports.remarks import Remarks

MARKER = "<!-- written by megarecipes: launch/report.py -->"
DAGGER = "†"  # of a row that has errata


def write(document: Document) -> str:
    written = f"Written {document.made}. Plots are in report.html in the same directory."
    blocks = [MARKER, f"# {text(document.title)}", written]
    if document.problems:
        blocks += ["**Could not be read**", bullets(document.problems)]
    blocks.append(bullets(document.notes))
    if document.comparison:
        blocks += _comparison(document.comparison)
    for section in document.sections:
        blocks += _section(section)
    return "\n\n".join(block for block in blocks if block) + "\n"


def text(value: object) -> str:
    """One line of text that Markdown and HTML leave alone."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", escape(" ".join(str(value).split()), quote=False))


def bullets(lines: Iterable[object]) -> str:
    return "\n".join(f"- {text(line)}" for line in lines)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _section(section: Section) -> list[str]:
    published = section.table
    ours = ["recipe", "status", *(column.heading for column in section.columns)]
    ours += ["measured / published", "hardware", "run"] if section.runs else []
    source = f"Source: {text(published.source)}. Table `{published.name}`, " if published.source else ""
    footnotes = {
        each.row.full_name: f"[^{published.name}-{number}]"
        for number, each in enumerate(section.remarks, start=1)
        if each.row
    }
    blocks = [
        f"## {text(published.title)}",
        f"{source}{section.summary}.",
        text(published.note or ""),
        table(
            [text(name) for name in (*published.columns, *ours)],
            (_cells(section, entry, footnotes) for entry in section.entries),
        ),
    ]
    if section.with_errata:
        marked = "The source contradicts itself or what it names: see the row's footnote (*erratum*)."
        blocks.append(f"{DAGGER} {marked}")
    if section.runs:
        blocks.append("**Deviations of the runs**")
    for entry in section.entries:
        if run := entry.run:
            tiny = " (TINY)" if run.tiny else ""
            blocks += [f"{text(run.label)}{tiny}, {text(run.name)}:", bullets(entry.deviations or ("none",))]
    if common := section.common.remarks:
        blocks.append("**Of all rows**")
        blocks.append("\n".join(f"- *{text(each.what)}*: {text(each.text)}" for each in common))
    return [
        *blocks,
        *(_footnote(footnotes[each.row.full_name], each) for each in section.remarks if each.row),
    ]


def _cells(section: Section, entry: Entry, footnotes: dict[str, str]) -> list[str]:
    row, run = entry.row, entry.run
    marks = [DAGGER] if row.full_name in section.with_errata else []
    marks += [footnotes[row.full_name]] if row.full_name in footnotes else []
    status = ("**TINY** " if run and run.tiny else "") + text(entry.status)
    cells = [*map(text, row.cells), " ".join([text(row.name), *marks]), status]
    if run:
        measured = [column.text(run) for column in section.columns]
        return [*cells, *map(text, (*measured, entry.outcome, run.result.hardware or "", run.label))]
    return [*cells, *[""] * (len(section.columns) + (3 if section.runs else 0))]


def _footnote(mark: str, remarks: Remarks) -> str:
    assert remarks.row
    said = (
        f"*{text(each.what)}*: {text(each.text)}{'' if each.text.endswith('.') else '.'}"
        for each in remarks.remarks
    )
    return f"{mark}: {text(remarks.row.name)}. {' '.join(said)}"


def _comparison(comparison: Comparison) -> list[str]:
    runs = [text(run.label) for run in comparison.runs]
    changed = [f"{name}, next to {runs[0]}" for name in runs[1:]]
    made = table(["", *runs], map(_difference, comparison.configuration))
    return [
        "## Runs compared",
        bullets(comparison.remarks),
        bullets(comparison.findings),
        "**Results**",
        table(["", *runs, *changed], map(_difference, comparison.results)),
        "**What differs in how they were made**",
        made if comparison.configuration else "Nothing.",
    ]


def _difference(row: Difference) -> list[str]:
    return [text(cell) for cell in (row.name, *row.values, *row.changes)]
