"""Plots of a report: published and measured throughput, losses, and seconds per step."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    Locator,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from launch.records.loss_plot import mean, moving_average, step_ticks, write_in_margin
from launch.records.result import TFLOPS_BY
from launch.records.result_text import EXACT
from launch.reports.comparison import incomparable
from launch.reports.entries import COLUMNS, RowEntry
from launch.reports.runs import OOM, Over, Points, ReportedRun, differences
from recipes.problems import counted

INK = "#1c2024"
FAINT = "#c3c9cf"
PALETTE = (
    "#3b82c4",
    "#d9822b",
    "#3a9d5d",
    "#cf4f4f",
    "#8f6fd1",
    "#9a7560",
    "#d06fa6",
    "#7f8790",
)
LOG_FROM = 30  # largest / smallest value; above this the axis is logarithmic
RUNS_PER_PLOT = len(PALETTE)
# One dash pattern per run, so that curves show through each other's gaps; validations have marks.
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
VALIDATION: dict[str, Any] = {
    "linestyle": ":",
    "linewidth": 0.8,
    "markersize": 5,
    "fillstyle": "none",
}
BARS: dict[str, Any] = {"facecolor": PALETTE[0], "alpha": 0.6}
HATCHED: dict[str, Any] = {**BARS, "hatch": "///", "edgecolor": INK, "linewidth": 0}
DIAMONDS: dict[str, Any] = {
    "marker": "D",
    "markersize": 6.5,
    "color": PALETTE[1],
    "linestyle": "",
    "markeredgecolor": INK,
    "markeredgewidth": 0.8,
}
MOST_POINTS = 1000  # of one curve
NOISY_POINTS = 300  # of a curve without smoothing; more would draw a band
THINNED = " Curves of more than {} steps are drawn as means of neighbouring steps."
# Share of the curves' range: a reference line further away is only named at the edge.
NEAR = 0.5
LEAST_RANGE = 0.2  # nats; the least range assumed for flat curves
LEAST_TICKS = 3  # on a logarithmic axis
# Quantity -> axis label. The time is drawn only where neither of the first two was published.
THROUGHPUT = {
    "tflops": "TFLOPS per GPU, counted as each row's source does",
    "samples_per_s": "samples per second, all GPUs",
    "time_per_iteration_s": "seconds per iteration",
}
OVER: dict[Over, str] = {
    "steps": "optimizer step",
    "tokens": "tokens read",
    "hours": "hours of optimizer steps, without validation and saving",
}
Legend = list[tuple[Any, str]]  # (handle, label)


class Curve(NamedTuple):
    """A run's values over the optimizer steps. `number`: of the run, for its color and dashes."""

    number: int
    run: ReportedRun
    points: Points


@dataclass(frozen=True)
class Plot:
    """An SVG image. `label`: its alternative text; `caption`: its contents and omissions."""

    svg: str
    label: str
    caption: str

    @property
    def address(self) -> str:
        """Return the image as a data address for <img>."""
        return (
            f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"
        )


def throughput(entries: Sequence[RowEntry]) -> list[Plot]:
    """Plot published numbers as bars and measured ones as points, one plot per quantity."""
    found = [key for key in THROUGHPUT if _published(entries, key)]
    return [
        _throughput(entries, key)
        for key in found
        if key != "time_per_iteration_s" or len(found) == 1
    ]


def losses(
    runs: Sequence[ReportedRun], over: Over = "steps", title: str = "Loss"
) -> list[Plot]:
    """Plot training losses (moving average) and validations over steps, tokens or hours.

    Runs whose losses are not comparable have plots of their own; a plot has `RUNS_PER_PLOT` runs.
    """
    found = []
    for drawn in _comparable(run for run in runs if run.training or run.validation):
        for start in range(0, len(drawn), RUNS_PER_PLOT):
            some = drawn[start : start + RUNS_PER_PLOT]
            which = f", runs {start + 1} to {start + len(some)} of {len(drawn)}"
            whole = title + which if len(drawn) > len(some) else title
            found.append(_losses(some, over, whole))
    return found


def _comparable(runs: Iterable[ReportedRun]) -> list[list[ReportedRun]]:
    """Group runs by whether their losses can be compared."""
    groups: list[list[ReportedRun]] = []
    for run in runs:
        for group in groups:
            if not incomparable(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def of_comparison(runs: Sequence[ReportedRun], over: Over = "steps") -> list[Plot]:
    """Plot losses, their differences from the first run's step by step, and the wall time of every step."""
    first, *others = runs
    apart = []
    seconds = [Curve(index, run, run.seconds) for index, run in enumerate(runs)]
    for index, run in enumerate(others, start=1):
        if incomparable(first, run):
            continue
        points = [
            (step, by) for step, by in differences(first.training, run.training) if by
        ]
        apart.append(Curve(index, run, points))
    figure = first.result.figures[0]
    difference = (
        f"Absolute difference of the {figure.name} of every step from that of {first.label}; steps without any "
        "difference are not drawn, nor runs whose losses are not comparable."
    )
    names = (
        f"Training {figure.name} next to {first.label}",
        f"absolute difference ({figure.unit})",
    )
    time = "Time per step"
    return [
        *losses(runs, over, "Losses"),
        *_steps(
            apart, names, "Difference of the training losses", difference, log=True
        ),
        *_steps(seconds, (time, "seconds"), time, "Wall time of every step."),
    ]


def of_runs(runs: Sequence[ReportedRun]) -> list[Plot]:
    """Plot samples per second and peak memory of each run; no plot of fewer than two runs."""
    if len(runs) < 2:
        return []
    oldest_first = list(reversed(runs))
    labels = [run.label for run in oldest_first]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(runs)), layout="constrained")
    for number, key in enumerate(("samples_per_s", "peak_gb"), start=1):
        axes = new_axes(figure, "", COLUMNS[key].heading, "", (1, 2, number))
        for y, run in enumerate(oldest_first):
            value = COLUMNS[key].of(run.result)
            if value is None or run.status == OOM:
                where: dict[str, Any] = {
                    "xycoords": ("axes fraction", "data"),
                    "va": "center",
                }
                axes.annotate(run.status, (0.01, y), fontsize=8, color=INK, **where)
            else:
                axes.barh(y, value, height=0.62, **BARS)
                if key == "samples_per_s":
                    _draw_spread(axes, y, value, run)
        shown = labels if number == 1 else [""] * len(runs)
        axes.set_yticks(range(len(runs)), shown)
        axes.set_ylim(len(runs) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
    caption = (
        "A run without a bar says how it ended, or has no such number. Half of a run's steps lie within its "
        "line: runs whose lines overlap are not told apart by speed."
    )
    return [_render(figure, [], "Speed and memory of the runs", caption)]


def _draw_spread(axes: Axes, y: float, value: float, run: ReportedRun) -> None:
    """Draw between which speeds half of the steps lie."""
    ends = run.result.speed.spread_of(value)
    if ends:
        axes.plot(ends, [y, y], color=INK, linewidth=1.2, marker="|", markersize=6)


def _steps(
    curves: Sequence[Curve],
    names: tuple[str, str],
    label: str,
    caption: str,
    log: bool = False,
) -> list[Plot]:
    """Plot curves without smoothing; return no plot without points. `names`: title and y axis."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = new_axes(figure, names[0], "optimizer step", names[1])
    legend = _draw(axes, curves, NOISY_POINTS)
    if not legend:
        return []
    if log or _wide([value for curve in curves for _, value in curve.points]):
        log_axis(axes, "y")
    return [_render(figure, legend, label, caption + THINNED.format(NOISY_POINTS))]


def _throughput(entries: Sequence[RowEntry], key: str) -> Plot:
    rows = {entry.row.full_name: entry.row for entry in entries}
    at = {name: y for y, name in enumerate(rows)}
    name_of_axis = _axis(entries, key)
    published = _published(entries, key)
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(rows)), layout="constrained")
    axes = new_axes(figure, "", name_of_axis, "")
    wrong = [name for name in published if rows[name].is_wrong(key)]
    right = [name for name in published if name not in wrong]
    for names, style in ((right, BARS), (wrong, HATCHED)):
        axes.barh(
            [at[name] for name in names],
            [published[name] for name in names],
            height=0.62,
            **style,
        )
    measured = ((at[entry.row.full_name], _measured(entry, key)) for entry in entries)
    points = [(y, value) for y, value in measured if value is not None]
    axes.plot(
        [value for _, value in points], [y for y, _ in points], zorder=3, **DIAMONDS
    )
    values = [*published.values(), *(value for _, value in points)]
    wide = _wide(values)
    if wide:
        log_axis(axes, "x")
        axes.set_xlim(min(values) / 2, max(values) * 1.5)
    for name, row in rows.items():
        if name not in published:
            why = (
                "published as out of memory"
                if row.published and row.published.oom
                else "not published"
            )
            where: dict[str, Any] = {
                "xycoords": ("axes fraction", "data"),
                "va": "center",
            }
            axes.annotate(why, (0.01, at[name]), fontsize=8, color=INK, **where)
    axes.set_yticks(range(len(rows)), [row.name for row in rows.values()])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    legend: Legend = [(Patch(**BARS), "published")]
    legend += (
        [(Patch(**HATCHED), "published, wrong by its erratum (†)")] if wrong else []
    )
    legend += [(Line2D([], [], **DIAMONDS), "measured")] if points else []
    parts = [
        f"{name_of_axis}{', logarithmic axis' if wide else ''}: bars as published, points as measured."
    ]
    if key == "tflops" and _counted_as(entries) == "exact_tflops":
        parts.append(f"{EXACT[0].upper()}{EXACT[1:]}.")
    left_out = sum(entry.incomparable is not None for entry in entries)
    if left_out:
        whose = "whose numbers are not those of the row (see the table)."
        parts.append(f"{counted(left_out, 'run')} left out, {whose}")
    elif not points:
        parts.append("Nothing of this table has been measured here.")
    return _render(
        figure, legend, f"Published and measured: {name_of_axis}", " ".join(parts)
    )


def _losses(runs: Sequence[ReportedRun], over: Over, title: str) -> Plot:
    unit = str(runs[0].result.figures[0])
    figure = Figure(
        figsize=(8, 4.6 + 0.2 * ((len(runs) + 1) // 2)), layout="constrained"
    )
    axes = new_axes(figure, title, OVER[over], unit)
    curves = []
    for index, run in enumerate(runs):
        averages = moving_average([loss for _, loss in run.training])
        smooth = [
            (step, average)
            for (step, _), average in zip(run.training, averages, strict=True)
        ]
        curves.append(Curve(index, run, run.along(smooth, over)))
    legend = _draw(axes, curves, MOST_POINTS, over)
    for index, run in enumerate(runs):
        points = thin(run.along(run.validation, over))
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=PALETTE[index],
                marker=MARKS[index],
                **VALIDATION,
            )
            if not run.training:
                legend.append((Line2D([], [], color=PALETTE[index]), run.full_label))
    if any(run.validation for run in runs):
        legend.append(
            (Line2D([], [], color=INK, marker=MARKS[0], **VALIDATION), "validation")
        )
    draw_references(axes, _entropies(runs), len(runs))
    caption = (
        "Lines: training loss, the mean of the steps around each (a fifteenth of the run, 201 at most, fewer "
        "towards the ends). Marks joined by dots: validation. Grey: entropy of a uniform and of a unigram "
        "model, with an arrow where it lies outside the axis."
    )
    return _render(
        figure, legend, f"{title}, {unit}", caption + THINNED.format(MOST_POINTS)
    )


def _draw(
    axes: Axes, curves: Sequence[Curve], most: int, over: Over = "steps"
) -> Legend:
    """Draw a line for each run with points; return the legend."""
    if over == "steps":
        axes.xaxis.set_major_locator(step_ticks())
    elif over == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter())
    legend: Legend = []
    for index, run, points in curves:
        points = thin(points, most)
        if points:
            style = {
                "color": PALETTE[index % len(PALETTE)],
                "linestyle": DASHES[index % len(DASHES)],
            }
            # a curve of one point would be invisible as a line
            marker = "." if len(points) == 1 else ""
            (line,) = axes.plot(
                *zip(*points, strict=True), linewidth=1.6, marker=marker, **style
            )
            legend.append((line, run.full_label))
    return legend


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Reduce a curve to at most `most` points by averaging neighbours."""
    if len(points) <= most:
        return points
    size = ceil(len(points) / most)
    buckets = (
        zip(*points[start : start + size], strict=True)
        for start in range(0, len(points), size)
    )
    return [(mean(steps), mean(values)) for steps, values in buckets]


def _published(entries: Sequence[RowEntry], key: str) -> dict[str, float]:
    """Map each row with a published number to that number."""
    numbers = {
        entry.row.full_name: getattr(entry.row.published, key, None)
        for entry in entries
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _counted_as(entries: Sequence[RowEntry]) -> str | None:
    """Return our count of TFLOPS that matches the published ones; None where sources used both."""
    published = [entry.row.published for entry in entries if entry.row.published]
    found = {each.tflops_by for each in published if each.tflops is not None} or {
        "formula"
    }
    return TFLOPS_BY[found.pop()][1] if len(found) == 1 else None


def _axis(entries: Sequence[RowEntry], key: str) -> str:
    """Return the axis label; for TFLOPS it names the source's count."""
    counted = _counted_as(entries) if key == "tflops" else None
    return COLUMNS[counted].heading if counted else THROUGHPUT[key]


def _measured(entry: RowEntry, key: str) -> float | None:
    """Return the measured value; None if missing or incomparable with the row."""
    counted = _counted_as([entry]) if key == "tflops" else key
    value = (
        COLUMNS[counted or key].of(entry.run.result)
        if entry.run and not entry.no_ratio
        else None
    )
    return value if value and value > 0 else None


def _entropies(runs: Sequence[ReportedRun]) -> dict[tuple[str, float], list[str]]:
    found: dict[tuple[str, float], list[str]] = {}
    for run in runs:
        for kind, value in vars(run.result.entropies).items():
            if value is not None:
                found.setdefault((kind, round(value, 4)), []).append(run.label)
    return found


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > LOG_FROM * min(values)


def new_axes(
    figure: Figure, title: str, x: str, y: str, place: tuple[int, int, int] = (1, 1, 1)
) -> Axes:
    axes = figure.add_subplot(*place)
    axes.set_title(title, fontsize=11, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK, which="both")
    axes.grid(alpha=0.5, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    return axes


def log_axis(axes: Axes, which: str) -> None:
    """Make the x or y axis logarithmic, with plain numbers: 0.001, 1e-05."""
    if which == "x":
        axes.set_xscale("log")
    else:
        axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogTicks())
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


class LogTicks(Locator):
    """Ticks of a logarithmic axis: decades; if few, also 2 and 5; if still few, any round numbers."""

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        return self.tick_values(*self.axis.get_view_interval())

    def tick_values(self, low: float, high: float) -> Sequence[float]:
        found: list[float] = []
        for locator in (
            LogLocator(numticks=9),
            LogLocator(subs=(1, 2, 5), numticks=9),
            MaxNLocator(6),
        ):
            found = [
                float(tick)
                for tick in locator.tick_values(low, high)
                if low <= tick <= high
            ]
            if len(found) >= LEAST_TICKS:
                break
        return found


def draw_references(
    axes: Axes, entropies: Mapping[tuple[str, float], Sequence[str]], runs: int
) -> None:
    """Draw and name a grey line for each (kind, nats) -> run labels, after the curves are drawn.

    `runs`: number of runs in the plot; a reference of only one of them names it.
    """
    values = [
        float(y) for line in axes.get_lines() for y in np.asarray(line.get_ydata())
    ]
    bottom, top = (min(values), max(values)) if values else (0.0, float("inf"))
    reach = NEAR * max(top - bottom, LEAST_RANGE)
    labels = []
    for (kind, value), names in entropies.items():
        whose = f"\n{names[0]}" if len(names) < runs and len(names) == 1 else ""
        labels.append((value, f"{kind} {value:.3f}{whose}"))
        if bottom - reach <= value <= top + reach:
            style = ":" if kind == "unigram" else "--"
            axes.axhline(value, color=FAINT, linestyle=style, linewidth=1.2)
    write_in_margin(axes, labels, INK, 8)


def _render(figure: Figure, legend: Legend, label: str, caption: str) -> Plot:
    """Render the figure as SVG, with the legend below the axes."""
    if legend:
        # matplotlib leaves labels out that begin with an underscore.
        labels = [f" {text}" if text.startswith("_") else text for _, text in legend]
        style: dict[str, Any] = {
            "fontsize": 9,
            "frameon": False,
            "labelcolor": INK,
            "handlelength": 3,
        }
        handles = [handle for handle, _ in legend]
        figure.legend(handles, labels, loc="outside lower center", ncols=2, **style)
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)  # a $ in a title is a dollar
    buffer = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", metadata=unsaid)
    svg = buffer.getvalue()
    return Plot(svg[svg.index("<svg") :], label, caption)
