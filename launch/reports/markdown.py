"""A report as Markdown with tables, footnotes and no plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from launch.reports.comparing import Comparison
from launch.reports.comparing import Row as Difference
from launch.reports.document import Document, Section
from launch.reports.table_lines import DAGGER, Line, Remarks

MARKER = "<!-- written by megarecipes: launch/report.py -->"


def write(document: Document) -> str:
    blocks = [
        MARKER,
        f"# {text(document.title)}",
        f"Written {document.made}. Plots are in report.html beside this file.",
    ]
    if document.problems:
        blocks += ["**Could not be read**", bullets(document.problems)]
    if document.notes:
        blocks.append(bullets(document.notes))
    if document.comparison:
        blocks += _comparison(document.comparison)
    for section in document.sections:
        blocks += _section(section)
    return "\n\n".join(block for block in blocks if block) + "\n"


def text(value: object) -> str:
    """One line of text that Markdown and HTML leave alone."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", escape(" ".join(str(value).split()), quote=False))


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {text(line)}" for line in lines)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _section(section: Section) -> list[str]:
    published = section.table
    headings = [
        text(name)
        for name in (*published.columns, "recipe", "status", *(column.heading for column in section.columns))
    ]
    footnotes = {remarks.row.full_name: number for number, remarks in enumerate(section.remarks, start=1)}
    if section.runs:
        headings += ["measured / published", "hardware", "run"]
    blocks = [
        f"## {text(published.title)}",
        f"Source: {text(published.source)}. Table `{published.name}`, {section.summary}."
        if published.source
        else f"{section.summary}.",
        text(published.note) if published.note else "",
        table(headings, (_cells(section, line, footnotes) for line in section.lines)),
    ]
    if section.with_errata:
        blocks.append(
            f"{DAGGER} The source contradicts itself or what it names: see the row's footnote (*erratum*)."
        )
    if section.deviations:
        blocks.append("**Deviations of the runs**")
    for run, deviations in section.deviations:
        blocks += [
            f"{text(run.label)}{' (TINY)' if run.tiny else ''}, {text(run.name)}:",
            bullets(deviations or ("none",)),
        ]
    if section.common:
        blocks += [
            "**Of all rows**",
            "\n".join(f"- *{text(what)}*: {text(said)}" for what, said in section.common),
        ]
    return [
        *blocks,
        *(
            _footnote(published.name, footnotes[remarks.row.full_name], remarks)
            for remarks in section.remarks
        ),
    ]


def _cells(section: Section, line: Line, footnotes: dict[str, int]) -> list[str]:
    number = footnotes.get(line.row.full_name)
    dagger = f" {DAGGER}" if line.row.full_name in section.with_errata else ""
    reference = f" [^{section.table.name}-{number}]" if number else ""
    status = ("**TINY** " if line.run and line.run.tiny else "") + text(line.status)
    cells = [*(text(cell) for cell in line.row.cells), text(line.row.name) + dagger + reference, status]
    if line.run:
        cells += [text(column.text(line.run)) for column in section.columns]
        cells += [text(line.outcome), text(line.run.row.get("hardware") or ""), text(line.run.label)]
    else:
        cells += [""] * (len(section.columns) + (3 if section.runs else 0))
    return cells


def _footnote(table_name: str, number: int, remarks: Remarks) -> str:
    return f"[^{table_name}-{number}]: {text(remarks.row.name)}. " + " ".join(
        f"*{text(what)}*: {text(said)}{'' if said.endswith('.') else '.'}" for what, said in remarks.lines
    )


def _comparison(comparison: Comparison) -> list[str]:
    runs = [text(run.label) for run in comparison.runs]
    changed = [f"{name}, beside {runs[0]}" for name in runs[1:]]
    return [
        "## Runs compared",
        bullets(comparison.remarks),
        bullets(comparison.findings),
        "**Results**",
        table(["", *runs, *changed], (_difference(row) for row in comparison.results)),
        "**What differs in how they were made**",
        table(["", *runs], (_difference(row) for row in comparison.configuration))
        if comparison.configuration
        else "Nothing.",
    ]


def _difference(row: Difference) -> list[str]:
    return [text(cell) for cell in (row.name, *row.values, *row.changes)]
