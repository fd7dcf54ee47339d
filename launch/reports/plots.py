"""Plots of a report: runs by speed and memory, and losses."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from launch.console.text_table import loss
from launch.records.loss_plot import (
    INK,
    PALETTE,
    CurveName,
    mean,
    moving_average,
    step_ticks,
    without_formulas,
    write_in_margin,
)
from launch.reports.comparison import incomparable
from launch.reports.entries import COLUMNS
from launch.reports.runs import OOM, Over, Points, ReportedRun
from recipes.problems import some

FAINT = "#c3c9cf"
RUNS_PER_PLOT = len(PALETTE)
NAMED = 3  # runs in a title
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
MOST_POINTS = 1000  # of one curve
OVER: dict[Over, str] = {
    "steps": "optimizer step",
    "tokens": "tokens read",
    "hours": "hours of optimizer steps, without validation and saving",
}


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


def losses(runs: Sequence[ReportedRun], over: Over = "steps") -> list[Plot]:
    """Plot training losses (moving average) and validations over steps, tokens or hours.

    Runs whose losses are not comparable have plots of their own; a plot has `RUNS_PER_PLOT` runs. Their names
    stand in the margin.
    """
    waiting = [run for run in runs if run.training or run.validation]
    plots = []
    while waiting:
        first, *others = waiting
        drawn = [first]
        waiting = []
        for run in others:
            (waiting if incomparable(first, run) else drawn).append(run)
        for start in range(0, len(drawn), RUNS_PER_PLOT):
            plots.append(_losses(drawn[start : start + RUNS_PER_PLOT], over))
    return plots


def of_runs(runs: Sequence[ReportedRun]) -> list[Plot]:
    """Plot samples per second and peak memory of each run; no plot of fewer than two runs."""
    if len(runs) < 2:
        return []
    oldest_first = list(reversed(runs))
    rows = range(len(runs))
    figure = Figure(figsize=(8, 1.8 + 0.3 * len(runs)), layout="constrained")
    title = _of("Speed and memory", runs)
    figure.suptitle(title, fontsize=11, color=INK)
    for number, key in enumerate(("samples_per_s", "peak_gb"), start=1):
        axes = new_axes(figure, "", COLUMNS[key].heading, "", (1, 2, number))
        for y, run in enumerate(oldest_first):
            value = COLUMNS[key].of(run.result)
            if value is None or run.status == OOM:
                axes.annotate(
                    run.status,
                    (0.01, y),
                    xycoords=("axes fraction", "data"),
                    fontsize=8,
                    color=INK,
                    va="center",
                )
                continue
            axes.barh(y, value, height=0.62, facecolor=PALETTE[0], alpha=0.6)
            ends = run.result.speed.spread_of(value)
            if ends and key == "samples_per_s":
                axes.plot(ends, [y, y], color=INK, linewidth=1.2, marker="|")
        axes.set_yticks(rows, [run.label * (number == 1) for run in oldest_first])
        axes.set_ylim(len(runs) - 0.4, -0.6)  # the first at the top
        axes.grid(visible=False, axis="y")
    caption = (
        "A run without a bar says how it ended, or has no such number. Half of a run's steps lie within its "
        "line: runs whose lines overlap are not told apart by speed."
    )
    return [_render(figure, title, caption)]


def _of(what: str, runs: Sequence[ReportedRun]) -> str:
    """Return the title of a plot of some runs, which no other plot of these quantities shows."""
    return f"{what} of {some([run.label for run in runs], NAMED)}"


def _losses(runs: Sequence[ReportedRun], over: Over) -> Plot:
    drawn = runs[0].result.figures[0]
    title = _of(f"{drawn.name[0].upper()}{drawn.name[1:]}", runs)
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = new_axes(figure, title, OVER[over], str(drawn))
    if over == "steps":
        axes.xaxis.set_major_locator(step_ticks())
    elif over == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter())
    names = []
    for run, color, dashes, mark in zip(runs, PALETTE, DASHES, MARKS, strict=False):
        steps = [step for step, _ in run.training]
        averages = moving_average([nats for _, nats in run.training])
        points = thin(run.along([*zip(steps, averages, strict=True)], over))
        # a curve of one point would be invisible as a line
        marker = "." if len(points) == 1 else ""
        style = {"linestyle": dashes, "marker": marker, "linewidth": 1.6}
        across = [x for x, _ in points]
        axes.plot(across, [y for _, y in points], color=color, **style)
        validations = thin(run.along(run.validation, over))
        if validations:
            places = zip(*validations, strict=True)
            axes.plot(*places, color=color, marker=mark, **VALIDATION)
        for _, last in [*points, *validations][-1:]:
            mark = " (TINY)" * run.tiny
            names.append(CurveName(last, f"{run.label}{mark} {loss(last)}", color))
    write_in_margin(axes, names)
    caption = (
        "Lines: training loss, the mean of the steps around each (a fifteenth of the run, 201 at most). Marks "
        "joined by dots: validation, and the number behind a run is its last one. Curves of more than "
        f"{MOST_POINTS} steps are drawn as means of neighbouring steps."
    )
    return _render(figure, f"{title}, {drawn.unit}", caption)


def thin(points: Points) -> Points:
    """Reduce a curve to at most MOST_POINTS points by averaging neighbours."""
    size = ceil(len(points) / MOST_POINTS)
    thinned = []
    for start in range(0, len(points), size or 1):
        across, up = zip(*points[start : start + size], strict=True)
        thinned.append((mean(across), mean(up)))
    return thinned


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


def _render(figure: Figure, label: str, caption: str) -> Plot:
    """Render the figure as SVG."""
    without_formulas(figure)
    buffer = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", metadata=unsaid)
    svg = buffer.getvalue()
    return Plot(svg[svg.index("<svg") :], label, caption)
