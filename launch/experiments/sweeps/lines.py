"""Lines of a sweep, measured and published: table on the screen, Markdown, CSV, and plot."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launch.console import numbers, text_table
from launch.records.result import TFLOPS_BY
from launch.reports import markdown
from launch.reports.plots import MARKS, PALETTE, THROUGHPUT, new_axes
from launch.reports.runs import Run
from launch.reports.tables import PublishedTable
from recipes.key_paths import differences, flatten, is_part
from recipes.schema import Recipe

# Quantity -> heading of its column.
COLUMNS = {
    "time_per_iteration_s": "s/iteration",
    "samples_per_s": "samples/s",
    "tflops": "TFLOPS per GPU",
    "memory_gb": "memory (GB)",
}
WORK = ("model", "sequence_length", "batch", "parallel", "activation_checkpointing", "ds_config")
FOLLOWING = ("batch.global", "batch.accumulation", "parallel.dp")  # of other swept keys


@dataclass(frozen=True)
class Line:
    """A point of a sweep or of a published table.

    Attributes:
        memory_gb: peak of the fullest rank, on a GPU as reserved by torch's allocator.
        note: the reason of a point without numbers; the name of a published row.
    """

    values: tuple[object, ...]
    status: str
    time_per_iteration_s: float | None = None
    samples_per_s: float | None = None
    tflops: float | None = None
    memory_gb: float | None = None
    note: str = ""
    published: bool = False


def measured_line(values: Sequence[str], run: Run, base: Recipe) -> Line:
    """Return the line of a run; its TFLOPS are counted as those published of `base`."""
    result = run.result
    if result.status != "ok":
        return Line(tuple(values), result.status, note=result.reason or "")
    speed, size = result.speed, result.memory.cached_bytes or result.memory.peak_bytes
    counted = TFLOPS_BY[base.published.tflops_by if base.published else "formula"][1]
    rates = (speed.seconds_per_step, speed.samples_per_s, getattr(speed, counted))
    return Line(tuple(values), result.status, *rates, numbers.gigabytes(size))


def published_lines(table: PublishedTable, base: Recipe, keys: Sequence[str]) -> list[Line]:
    """Return the rows of a table that differ from `base` in the swept keys alone, and in what follows."""
    lines = []
    for row in table.rows:
        if row.recipe is None or (published := row.published) is None:
            continue
        values = row.recipe.compared()
        changed = [key for key, _, _ in differences(base.compared(), values) if is_part(key, WORK)]
        if all(is_part(key, (*keys, *FOLLOWING)) for key in changed):
            found = tuple(dict(flatten(values)).get(key) for key in keys)
            rates = (published.time_per_iteration_s, published.samples_per_s, published.tflops)
            status = "OOM" if published.oom else "ok"
            lines.append(Line(found, status, *rates, published.cached_gb, row.full_name, published=True))
    return lines


def cells(lines: Sequence[Line], keys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of a table, without columns that hold nothing."""
    used = [name for name in COLUMNS if any(getattr(line, name) is not None for line in lines)]
    rows = [
        [*map(str, line.values), "published" if line.published and line.status == "ok" else line.status]
        + [numbers.number(getattr(line, name)) for name in used]
        + [" ".join(line.note.split())]
        for line in lines
    ]
    return [*keys, "status", *(COLUMNS[name] for name in used), "note"], rows


def as_text(lines: Sequence[Line], keys: Sequence[str], width: int | None) -> str:
    headings, rows = cells(lines, keys)
    return text_table.table(
        rows, headings, "l" * (len(keys) + 1) + "r" * (len(headings) - len(keys) - 2) + "l", width
    )


def write(lines: Sequence[Line], keys: Sequence[str], title: str, out: Path) -> None:
    """Write OUT/sweep.md, OUT/sweep.csv and OUT/sweep.png."""
    headings, rows = cells(lines, keys)
    shown = markdown.table([*map(markdown.text, headings)], ([*map(markdown.text, row)] for row in rows))
    (out / "sweep.md").write_text(f"# {markdown.text(title)}\n\n{shown}\n\n![](sweep.png)\n")
    written = io.StringIO()
    sheet = csv.writer(written, lineterminator="\n")
    sheet.writerow([*keys, "status", *COLUMNS, "published", "note"])
    for line in lines:
        measured = (getattr(line, name) for name in COLUMNS)
        sheet.writerow([*line.values, line.status, *measured, line.published, line.note])
    (out / "sweep.csv").write_text(written.getvalue())
    draw(lines, keys, title, out / "sweep.png")


def draw(lines: Sequence[Line], keys: Sequence[str], title: str, out: Path) -> None:
    """Draw throughput and memory over the first key, a curve for each combination of the others.

    Published points have panels of their own: other hardware, other scale. Points without numbers are
    crosses at the bottom.
    """
    printed = [line for line in lines if line.published]
    quantity = next(
        (each for each in THROUGHPUT if any(getattr(line, each) for line in printed)), "samples_per_s"
    )
    panels = [(name, False) for name in (quantity, "memory_gb")] + [(quantity, True)] * bool(printed)
    figure = Figure(figsize=(7.5, 2.6 * len(panels) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9, parse_math=False)
    places = _places([line.values[0] for line in lines])
    for number, (name, of_source) in enumerate(panels, start=1):
        whose = "published" if of_source else "measured"
        axes = new_axes(figure, "", keys[0], f"{COLUMNS[name]}, {whose}", (len(panels), 1, number))
        shown = [line for line in lines if line.published == of_source]
        for index, others in enumerate(dict.fromkeys(line.values[1:] for line in shown)):
            style: dict[str, Any] = {
                "color": PALETTE[index % len(PALETTE)],
                "marker": MARKS[index % len(MARKS)],
            }
            own = [line for line in shown if line.values[1:] == others]
            label = ", ".join(f"{key}={value}" for key, value in zip(keys[1:], others, strict=True))
            curve = sorted(
                (places[str(line.values[0])], y) for line in own if (y := getattr(line, name)) is not None
            )
            axes.plot(*zip(*curve, strict=True) if curve else ((), ()), label=label, **style)
            for line in own:
                if getattr(line, name) is None and line.status != "ok":
                    at = (places[str(line.values[0])], 0.05 + 0.12 * index), axes.get_xaxis_transform()
                    axes.plot(*at[0], "x", transform=at[1], color=style["color"], markersize=9)
                    axes.annotate(f"  {line.status}", at[0], xycoords=at[1], fontsize=7, rotation=60)
        axes.set_xticks([*places.values()], [*places], fontsize=8, rotation=60 if len(places) > 8 else 0)
        axes.set_xlim(min(places.values()) - 0.4, max(places.values()) + 0.6)
        axes.set_ylim(0, 1.15 * max((y for line in shown if (y := getattr(line, name))), default=1))
        if len(keys) > 1:
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(out, dpi=120)


def _places(values: Sequence[object]) -> dict[str, float]:
    """Return a place on the axis for each value as text: logarithmic for positive numbers, else in order."""
    texts = dict.fromkeys(map(str, values))
    try:
        return {text: math.log2(float(text)) for text in sorted(texts, key=float)}
    except ValueError:  # a text, or not positive
        return {text: float(number) for number, text in enumerate(texts)}
