"""Write a report as Markdown: tables and footnotes, no plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from launch.reports.comparison import Comparison
from launch.reports.document import Document, Section
from launch.reports.entries import Entry, Scale
from launch.reports.frames import Frame
from launch.reports.remarks import Remark

MARKER = "<!-- written by megarecipes: launch/report.py -->"
DAGGER = "†"  # marks a row with errata
# Text in front of a run's status.
SCALES: dict[Scale | None, str] = {"tiny": "**TINY** ", "other": "**OTHER MODEL** "}


def write(document: Document) -> str:
    written = f"Written {document.made}. Plots are in report.html in the same directory."
    blocks = [MARKER, f"# {text(document.title)}", written]
    if document.problems:
        blocks += ["**Could not be read**", bullets(document.problems)]
    blocks.append(bullets(document.notes))
    blocks += _comparison(document.comparison) if document.comparison else []
    blocks += ["## Scores", *_frame(document.scores)] if document.scores else []
    blocks += [block for section in document.sections for block in _section(section)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def text(value: object) -> str:
    """Return the value as one line, escaped for Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", escape(" ".join(str(value).split()), quote=False))


def bullets(lines: Iterable[object]) -> str:
    return "\n".join(f"- {text(line)}" for line in lines)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the cells are Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _section(section: Section) -> list[str]:
    published = section.table
    ran = bool(section.runs)
    ours = ["recipe", *(["run"] if ran else []), "status", *(column.heading for column in section.columns)]
    ours += ["measured / published", "hardware"] if ran else []
    source = f"Source: {text(published.source)}. Table `{published.name}`, " if published.source else ""
    numbered = enumerate(section.remarks, start=1)
    footnotes = {row.full_name: f"[^{published.name}-{number}]" for number, (row, _) in numbered}
    rows = (_cells(section, entry, footnotes) for entry in section.entries)
    blocks = [
        f"## {text(published.title)}",
        f"{source}{section.summary}.",
        text(published.note or ""),
        table([*map(text, published.columns), *map(text, ours)], rows),
    ]
    if section.errata_ids:
        marked = "The source contradicts itself or what it names: see the row's footnote (*erratum*)."
        blocks.append(f"{DAGGER} {marked}")
    blocks += [block for frame in section.frames for block in _frame(frame)]
    if section.runs:
        blocks.append("**Deviations of the runs**")
    for entry in section.entries:
        if run := entry.run:
            blocks += [f"{text(run.full_label)}, {text(run.name)}:", bullets(entry.deviations or ["none"])]
    if section.common:
        blocks.append("**Of all rows**")
        blocks.append("\n".join(f"- {_remark_text(each)}" for each in section.common))
    for row, remarks in section.remarks:
        said = " ".join(_remark_text(each) + ("" if each.text.endswith(".") else ".") for each in remarks)
        blocks.append(f"{footnotes[row.full_name]}: {text(row.name)}. {said}")
    return blocks


def _cells(section: Section, entry: Entry, footnotes: Mapping[str, str]) -> list[str]:
    row, run = entry.row, entry.run
    marks = [DAGGER] if row.full_name in section.errata_ids else []
    marks += [footnotes[row.full_name]] if row.full_name in footnotes else []
    status = SCALES.get(entry.scale, "") + text(entry.status)
    cells = [*map(text, row.cells), " ".join([text(row.name), *marks])]
    if run:
        measured = [column.text(run) for column in section.columns]
        said = map(text, (*measured, entry.outcome, run.result.hardware or ""))
        return [*cells, text(run.label), status, *said]
    if section.runs:
        return [*cells, "", status, *[""] * (len(section.columns) + 2)]
    return [*cells, status]


def _remark_text(remark: Remark) -> str:
    return f"*{text(remark.what)}*: {text(remark.text)}"


def _frame(frame: Frame) -> list[str]:
    title = f"**{frame.title}**" if frame.title else ""
    rows = ([*map(text, row)] for row in frame.rows)
    return [title, frame.note, table([*map(text, frame.headings)], rows) if frame.rows else "Nothing."]


def _comparison(comparison: Comparison) -> list[str]:
    return [
        "## Runs compared",
        bullets(comparison.remarks),
        bullets(comparison.findings),
        *_frame(comparison.results),
        *_frame(comparison.configuration),
    ]
