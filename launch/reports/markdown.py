"""Write a report as Markdown: tables and footnotes, no plots."""

from __future__ import annotations

from collections.abc import Mapping

from launch.reports.comparison import Comparison
from launch.reports.document import ReportDocument, Section
from launch.reports.entries import EntryRemark, RowEntry, Scale
from launch.reports.frames import blocks, bullets, table, text

MARKER = "<!-- written by megarecipes: launch/report.py -->"
DAGGER = "†"  # marks a row with errata
# Text in front of a run's status.
SCALES: dict[Scale | None, str] = {"tiny": "**TINY** ", "other": "**OTHER MODEL** "}


def write(document: ReportDocument) -> str:
    found = [
        MARKER,
        f"# {text(document.title)}",
        f"Written {document.made}. Plots are in report.html in the same directory.",
    ]
    if document.problems:
        found += ["**Could not be read**", bullets(document.problems)]
    found.append(bullets(document.notes))
    if document.comparison:
        found += _comparison(document.comparison)
    if document.scores:
        found += ["## Scores", *blocks(document.scores)]
    found += [block for section in document.sections for block in _section(section)]
    return "\n\n".join(filter(None, found)) + "\n"


def _section(section: Section) -> list[str]:
    published = section.table
    runs = section.runs
    ours = [
        "recipe",
        *["run"] * bool(runs),
        "status",
        *(column.heading for column in section.columns),
    ]
    ours += ["measured / published", "hardware"] * bool(runs)
    source = (
        f"Source: {text(published.source)}. Table `{published.name}`, "
        if published.source
        else ""
    )
    numbered = enumerate(section.remarks, start=1)
    footnotes = {
        row.full_name: f"[^{published.name}-{number}]" for number, (row, _) in numbered
    }
    rows = (_cells(section, entry, footnotes) for entry in section.entries)
    found = [
        f"## {text(published.title)}",
        f"{source}{section.summary}.",
        text(published.note or ""),
        table([*map(text, published.columns), *map(text, ours)], rows),
    ]
    if section.errata_ids:
        marked = "The source contradicts itself or what it names: see the row's footnote (*erratum*)."
        found.append(f"{DAGGER} {marked}")
    found += [block for frame in section.frames for block in blocks(frame)]
    if runs:
        found.append("**Deviations of the runs**")
    for entry in section.entries:
        run = entry.run
        if run:
            found += [
                f"{text(run.full_label)}, {text(run.name)}:",
                bullets(entry.deviations or ["none"]),
            ]
    if section.common:
        found += [
            "**Of all rows**",
            "\n".join(f"- {_remark_text(each)}" for each in section.common),
        ]
    for row, remarks in section.remarks:
        said = " ".join(
            _remark_text(each) + ("" if each.text.endswith(".") else ".")
            for each in remarks
        )
        found.append(f"{footnotes[row.full_name]}: {text(row.name)}. {said}")
    return found


def _cells(
    section: Section, entry: RowEntry, footnotes: Mapping[str, str]
) -> list[str]:
    row = entry.row
    run = entry.run
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


def _remark_text(remark: EntryRemark) -> str:
    return f"*{text(remark.what)}*: {text(remark.text)}"


def _comparison(comparison: Comparison) -> list[str]:
    said = [bullets(comparison.remarks), bullets(comparison.findings)]
    return [
        "## Runs compared",
        *said,
        *blocks(comparison.results),
        *blocks(comparison.configuration),
    ]
