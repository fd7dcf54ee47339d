"""Plots of a report: published throughput with what was measured, losses, and seconds per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from launch.reports import curves, numbers, svg
from launch.reports.references import draw_references
from launch.reports.runs import Run
from launch.reports.svg import INK, PALETTE, log_axis, step_axis
from launch.reports.table_lines import MEASURED, Line, is_wrong
from launch.runs import result

LOG_FROM = 30  # largest / smallest value above which a linear axis would hide the small ones
RUNS_PER_FIGURE = len(PALETTE)
# Of the runs of one figure: each curve shows through the gaps of the next, and its validations have a mark of their own.
DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 3)),
    (0, (3, 3)),
    (0, (1, 2)),
    (0, (9, 3, 2, 3)),
    (0, (5, 2, 1, 2)),
    (0, (2, 4)),
    (0, (8, 5)),
)
MARKS = "os^DvPX*"
VALIDATION: dict[str, Any] = {"linestyle": ":", "linewidth": 0.8, "markersize": 5, "fillstyle": "none"}
NOISY_POINTS = 300  # of a curve that is not smoothed: more would be a band
THROUGHPUT = {  # quantity -> axis; the first two are drawn where they were published, the time only where neither was
    "tflops": "TFLOPS per GPU, counted as each row's source does",
    "samples_per_s": "samples per second, all GPUs",
    "time_per_iteration_s": "seconds per iteration",
}
UNITS = {"loss": "loss (nats per token)", "mlm_loss": "loss (nats per masked token)"}


@dataclass(frozen=True)
class Figure:
    """One plot. `svg`: an element of the page; `caption`: what is drawn, and what is left out."""

    svg: str
    caption: str


def throughput(lines: Sequence[Line], prefix: str) -> list[Figure]:
    """A bar for each published number with the measured ones as points on it; one figure per quantity."""
    asked = [key for key in ("tflops", "samples_per_s") if _published(lines, key)] or ["time_per_iteration_s"]
    return [_throughput(lines, key, f"{prefix}-{key}") for key in asked if _published(lines, key)]


def losses(runs: Sequence[Run], prefix: str, title: str = "Loss") -> list[Figure]:
    """Training (moving average) and validation of every run; one figure per unit and `RUNS_PER_FIGURE` runs."""
    found = []
    for key in UNITS:
        drawn = [
            run for run in runs if run.loss_key == key and (curves.training(run) or curves.validation(run))
        ]
        for start in range(0, len(drawn), RUNS_PER_FIGURE):
            part = drawn[start : start + RUNS_PER_FIGURE]
            more = (
                f", runs {start + 1} to {start + len(part)} of {len(drawn)}"
                if len(drawn) > RUNS_PER_FIGURE
                else ""
            )
            most = curves.points_per_curve(2 * len(drawn))
            found.append(_losses(part, UNITS[key], f"{prefix}-{key}-{start}", title + more, most))
    return found


def step_times(runs: Sequence[Run], prefix: str) -> list[Figure]:
    figure = svg.new_figure(8, 4.2)
    axes = svg.new_axes(figure, "Time per step", "optimizer step", "seconds")
    step_axis(axes)
    entries = _draw(axes, runs, curves.seconds, NOISY_POINTS)
    if not entries:
        return []
    if _wide([value for run in runs for _, value in curves.seconds(run)]):
        log_axis(axes, "y")
    svg.legend_below(figure, entries)
    return [
        Figure(
            svg.render(figure, prefix, "Time per step"),
            "Wall time of every step." + _thinned(runs, NOISY_POINTS),
        )
    ]


def loss_differences(first: Run, others: Sequence[Run], prefix: str) -> list[Figure]:
    """How far the training loss of each other run is from the first's, step by step."""
    figure = svg.new_figure(8, 4.2)
    axes = svg.new_axes(
        figure, f"Training loss beside {first.label}", "optimizer step", "absolute difference (nats)"
    )
    step_axis(axes)
    entries = _draw(axes, others, lambda run: curves.differences(first, run), NOISY_POINTS, first_colour=1)
    if not entries:
        return []
    log_axis(axes, "y")
    svg.legend_below(figure, entries)
    caption = f"Absolute difference of the loss of every step from that of {first.label}; steps without any difference are not drawn."
    return [
        Figure(
            svg.render(figure, prefix, "Difference of the training losses"),
            caption + _thinned(others, NOISY_POINTS),
        )
    ]


def _throughput(lines: Sequence[Line], key: str, prefix: str) -> Figure:
    rows = list(dict.fromkeys(line.row.full_name for line in lines))
    by_row = {line.row.full_name: line for line in lines}
    figure = svg.new_figure(8, 1.5 + 0.3 * len(rows))
    axes = svg.new_axes(figure, "", _axis(lines, key), "")
    published = _published(lines, key)
    wrong = [name for name in published if is_wrong(by_row[name].row, key)]
    bars: dict[str, Any] = dict(facecolor=PALETTE[0], alpha=0.6)
    hatched = {**bars, "hatch": "///", "edgecolor": INK, "linewidth": 0}
    for names, style in (([name for name in published if name not in wrong], bars), (wrong, hatched)):
        axes.barh(
            [rows.index(name) for name in names], [published[name] for name in names], height=0.62, **style
        )
    points = [
        (rows.index(line.row.full_name), value)
        for line in lines
        if (value := _measured(line, key)) is not None
    ]
    diamonds = dict(
        marker="D", markersize=6.5, color=PALETTE[1], markeredgecolor=INK, markeredgewidth=0.8, linestyle=""
    )
    axes.plot([x for _, x in points], [y for y, _ in points], zorder=3, **diamonds)
    values = [*published.values(), *(value for _, value in points)]
    if _wide(values):
        log_axis(axes, "x")
        axes.set_xlim(min(values) / 2, max(values) * 1.5)
    for y, name in enumerate(rows):
        if name not in published:
            axes.annotate(
                _missing(by_row[name]),
                (0.01, y),
                xycoords=("axes fraction", "data"),
                va="center",
                fontsize=8,
                color=INK,
            )
    axes.set_yticks(range(len(rows)), [by_row[name].row.name for name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    entries: list[tuple[Any, str]] = [(Patch(**bars), "published")]
    if wrong:
        entries.append((Patch(**hatched), "published, wrong by its erratum (†)"))
    if points:
        entries.append((Line2D([], [], **diamonds), "measured"))
    svg.legend_below(figure, entries)
    title = f"Published and measured: {_axis(lines, key)}"
    return Figure(svg.render(figure, prefix, title), _throughput_caption(lines, key, points, values))


def _throughput_caption(lines: Sequence[Line], key: str, points: Sequence, values: Sequence[float]) -> str:
    parts = [
        f"{_axis(lines, key)}{', logarithmic axis' if _wide(values) else ''}: bars as published, points as measured."
    ]
    if key == "tflops" and _counted_as(lines) == "exact_tflops":
        parts.append(f"{result.EXACT[0].upper()}{result.EXACT[1:]}.")
    left_out = [
        line for line in lines if line.run and line.no_ratio and line.no_ratio.startswith("not compared")
    ]
    if left_out:
        count = f"{len(left_out)} run{'s' if len(left_out) > 1 else ''}"
        parts.append(f"{count} left out, whose numbers are not those of the row (see the table).")
    elif not points:
        parts.append("Nothing of this table has been measured here.")
    return " ".join(parts)


def _losses(runs: Sequence[Run], unit: str, prefix: str, title: str, most: int) -> Figure:
    figure = svg.new_figure(8, 4.6 + 0.2 * ((len(runs) + 1) // 2))
    axes = svg.new_axes(figure, title, "optimizer step", unit)
    step_axis(axes)
    entries = _draw(axes, runs, curves.training, most)
    validated = False
    for index, run in enumerate(runs):
        points = curves.thin(curves.validation(run), most)
        if points:
            validated = True
            axes.plot(*zip(*points, strict=True), color=PALETTE[index], marker=MARKS[index], **VALIDATION)
            if all(label != _label(run) for _, label in entries):
                entries.append((Line2D([], [], color=PALETTE[index]), _label(run)))
    if validated:
        entries.append((Line2D([], [], color=INK, marker=MARKS[0], **VALIDATION), "validation"))
    outside = draw_references(axes, _entropies(runs), len(runs))
    svg.legend_below(figure, entries)
    caption = "Lines: training loss, moving average. Marks joined by dots: validation. Grey: entropy of a uniform and of a unigram model"
    caption += "; an arrow where it lies outside the axis." if outside else "."
    return Figure(svg.render(figure, prefix, f"{title}, {unit}"), caption + _thinned(runs, most))


def _draw(
    axes, runs: Sequence[Run], points_of: Callable[[Run], curves.Points], most: int, first_colour: int = 0
) -> list:
    """A line for each run that has points; (handle, label) of those."""
    entries = []
    for index, run in enumerate(runs, start=first_colour):
        points = curves.thin(points_of(run), most)
        if points:
            # A curve of one point would be invisible as a line.
            marker = "." if len(points) == 1 else ""
            (line,) = axes.plot(*zip(*points, strict=True), linewidth=1.6, marker=marker, color=PALETTE[index % len(PALETTE)],
                                linestyle=DASHES[index % len(DASHES)])  # fmt: skip
            entries.append((line, _label(run)))
    return entries


def _thinned(runs: Sequence[Run], most: int) -> str:
    longest = max((sum(record["kind"] == "step" for record in run.records) for run in runs), default=0)
    return (
        f" Curves of more than {most} steps are drawn as means of neighbouring steps."
        if longest > most
        else ""
    )


def _published(lines: Sequence[Line], key: str) -> dict[str, float]:
    """Row -> published number, of the rows that have one."""
    published = {line.row.full_name: line.row.recipe.published for line in lines if line.row.recipe}
    return {
        name: getattr(p, key)
        for name, p in published.items()
        if p is not None and getattr(p, key) is not None
    }


def _counted_as(lines: Sequence[Line]) -> str | None:
    """Which of our two counts of TFLOPS stands beside the published ones; None where the rows' sources made both."""
    rows = [line.row.recipe.published for line in lines if line.row.recipe and line.row.recipe.published]
    found = {published.tflops_by for published in rows if published.tflops is not None}
    return None if len(found) > 1 else result.TFLOPS_BY[found.pop() if found else "formula"][1]


def _axis(lines: Sequence[Line], key: str) -> str:
    """With the count of TFLOPS that the source made, and we beside it."""
    counted = _counted_as(lines) if key == "tflops" else None
    return next((column.heading for column in MEASURED if column.key == counted), THROUGHPUT[key])


def _measured(line: Line, key: str) -> float | None:
    """None also where the run's numbers are not those of the row."""
    column = next(
        column for column in MEASURED if column.key == (_counted_as([line]) if key == "tflops" else key)
    )
    value = column.value(line.run) if line.run and not line.no_ratio else None
    return value if numbers.is_number(value) and value > 0 else None


def _missing(line: Line) -> str:
    published = line.row.recipe.published if line.row.recipe else None
    return "published as out of memory" if published and published.oom else "not published"


def _entropies(runs: Sequence[Run]) -> dict[tuple[str, float], list[str]]:
    found: dict[tuple[str, float], list[str]] = {}
    for run in runs:
        for kind in ("uniform", "unigram"):
            value = run.row.get(f"{kind}_entropy")
            if value is not None:
                found.setdefault((kind, round(value, 4)), []).append(run.label)
    return found


def _label(run: Run) -> str:
    return run.label + (" (TINY)" if run.tiny else "")


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > LOG_FROM * min(values)
