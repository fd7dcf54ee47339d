"""Plots of a report: published throughput with what was measured, losses, and seconds per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from launch.records.loss_plot import moving_average
from launch.records.result import TFLOPS_BY
from launch.records.result_text import EXACT
from launch.reports import curves, drawing
from launch.reports.drawing import INK, PALETTE, Figure, log_axis
from launch.reports.entries import MEASURED, Entry
from launch.reports.runs import Points, Run
from recipes.plural import counted

LOG_FROM = 30  # largest / smallest value above which a linear axis would hide the small ones
RUNS_PER_FIGURE = len(PALETTE)
# One for each run of a figure: each curve shows through the gaps of the next; validations have a mark.
DASHES: tuple[Any, ...] = (
    *("-", (0, (6, 3)), (0, (3, 3)), (0, (1, 2))),
    *((0, (9, 3, 2, 3)), (0, (5, 2, 1, 2)), (0, (2, 4)), (0, (8, 5))),
)
MARKS = "os^DvPX*"
VALIDATION: dict[str, Any] = {"linestyle": ":", "linewidth": 0.8, "markersize": 5, "fillstyle": "none"}
BARS: dict[str, Any] = {"facecolor": PALETTE[0], "alpha": 0.6}
HATCHED: dict[str, Any] = {**BARS, "hatch": "///", "edgecolor": INK, "linewidth": 0}
DIAMONDS: dict[str, Any] = {
    **{"marker": "D", "markersize": 6.5, "color": PALETTE[1], "linestyle": ""},
    **{"markeredgecolor": INK, "markeredgewidth": 0.8},
}
NOISY_POINTS = 300  # of a curve that is not smoothed: more would be a band
COLUMNS = {column.key: column for column in MEASURED}
# Quantity -> axis; the first two are drawn where they were published, the time only where neither was.
THROUGHPUT = {
    "tflops": "TFLOPS per GPU, counted as each row's source does",
    "samples_per_s": "samples per second, all GPUs",
    "time_per_iteration_s": "seconds per iteration",
}


def throughput(entries: Sequence[Entry]) -> list[Figure]:
    """A bar for each published number with the measured ones as points on it; one figure per quantity."""
    found = [key for key in THROUGHPUT if _published(entries, key)]
    return [_throughput(entries, key) for key in found if key != "time_per_iteration_s" or len(found) == 1]


def losses(runs: Sequence[Run], title: str = "Loss") -> list[Figure]:
    """Training (moving average) and validation; one figure per unit and `RUNS_PER_FIGURE` runs."""
    found = []
    every = [run for run in runs if run.training or run.validation]
    for per in dict.fromkeys(run.loss_per for run in every):
        drawn = [run for run in every if run.loss_per == per]
        for start in range(0, len(drawn), RUNS_PER_FIGURE):
            some = drawn[start : start + RUNS_PER_FIGURE]
            which = f", runs {start + 1} to {start + len(some)} of {len(drawn)}"
            whole = title + which if len(drawn) > len(some) else title
            found.append(
                _losses(some, f"loss (nats per {per})", whole, curves.points_per_curve(2 * len(drawn)))
            )
    return found


def step_times(runs: Sequence[Run]) -> list[Figure]:
    """Wall time of every step."""
    wide = _wide([value for run in runs for _, value in run.seconds])
    label = "Time per step"
    return _steps(
        runs, lambda run: run.seconds, label, "seconds", label, "Wall time of every step.", log=wide
    )


def loss_differences(first: Run, *others: Run) -> list[Figure]:
    """How far the training loss of each other run is from the first's, step by step."""

    def difference(run: Run) -> Points:
        apart = curves.differences(dict(first.training), dict(run.training))
        return [(step, by) for step, by in apart if by]

    title, y = f"Training loss next to {first.label}", "absolute difference (nats)"
    label = "Difference of the training losses"
    caption = (
        f"Absolute difference of the loss of every step from that of {first.label}; steps without any "
        "difference are not drawn."
    )
    return _steps(others, difference, title, y, label, caption, log=True, first_colour=1)


def _steps(
    runs: Sequence[Run],
    points_of: Callable[[Run], Points],
    title: str,
    y: str,
    label: str,
    caption: str,
    *,
    log: bool,
    first_colour: int = 0,
) -> list[Figure]:
    """A curve for each run, not smoothed; no figure where no run has points."""
    canvas = drawing.new_drawing(8, 4.2)
    axes = drawing.step_axes(canvas, title, y)
    entries = _draw(axes, runs, points_of, NOISY_POINTS, first_colour)
    if not entries:
        return []
    if log:
        log_axis(axes, "y")
    drawing.legend_below(canvas, entries)
    return [drawing.render(canvas, label, caption + _thinned(runs, NOISY_POINTS))]


def _throughput(entries: Sequence[Entry], key: str) -> Figure:
    by_row = {entry.row.full_name: entry for entry in entries}
    rows = list(by_row)
    canvas = drawing.new_drawing(8, 1.5 + 0.3 * len(rows))
    axes = drawing.new_axes(canvas, "", _axis(entries, key), "")
    published = _published(entries, key)
    wrong = [name for name in published if by_row[name].row.is_wrong(key)]
    right = [name for name in published if name not in wrong]
    for names, style in ((right, BARS), (wrong, HATCHED)):
        values = [published[name] for name in names]
        axes.barh([rows.index(name) for name in names], values, height=0.62, **style)
    measured = ((rows.index(entry.row.full_name), _measured(entry, key)) for entry in entries)
    points = [(row, value) for row, value in measured if value is not None]
    axes.plot([value for _, value in points], [row for row, _ in points], zorder=3, **DIAMONDS)
    values = [*published.values(), *(value for _, value in points)]
    wide = _wide(values)
    if wide:
        log_axis(axes, "x")
        axes.set_xlim(min(values) / 2, max(values) * 1.5)
    for y, name in enumerate(rows):
        if name not in published:
            row = by_row[name].row.published
            why = "published as out of memory" if row and row.oom else "not published"
            frame = ("axes fraction", "data")
            axes.annotate(why, (0.01, y), xycoords=frame, va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [by_row[name].row.name for name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    legend: list[tuple[Any, str]] = [(Patch(**BARS), "published")]
    legend += [(Patch(**HATCHED), "published, wrong by its erratum (†)")] if wrong else []
    legend += [(Line2D([], [], **DIAMONDS), "measured")] if points else []
    drawing.legend_below(canvas, legend)
    axis = _axis(entries, key)
    parts = [f"{axis}{', logarithmic axis' if wide else ''}: bars as published, points as measured."]
    if key == "tflops" and _counted_as(entries) == "exact_tflops":
        parts.append(f"{EXACT[0].upper()}{EXACT[1:]}.")
    if left_out := sum(entry.incomparable is not None for entry in entries):
        parts.append(
            f"{counted(left_out, 'run')} left out, whose numbers are not those of the row (see the table)."
        )
    elif not points:
        parts.append("Nothing of this table has been measured here.")
    return drawing.render(canvas, f"Published and measured: {axis}", " ".join(parts))


def _losses(runs: Sequence[Run], unit: str, title: str, most: int) -> Figure:
    canvas = drawing.new_drawing(8, 4.6 + 0.2 * ((len(runs) + 1) // 2))
    axes = drawing.step_axes(canvas, title, unit)

    def smooth(run: Run) -> Points:
        averages = moving_average([loss for _, loss in run.training])
        return [(step, average) for (step, _), average in zip(run.training, averages, strict=True)]

    entries = _draw(axes, runs, smooth, most)
    for index, run in enumerate(runs):
        if points := curves.thin(run.validation, most):
            axes.plot(*zip(*points, strict=True), color=PALETTE[index], marker=MARKS[index], **VALIDATION)
            if not run.training:
                entries.append((Line2D([], [], color=PALETTE[index]), _label(run)))
    if any(run.validation for run in runs):
        entries.append((Line2D([], [], color=INK, marker=MARKS[0], **VALIDATION), "validation"))
    outside = drawing.draw_references(axes, _entropies(runs), len(runs))
    drawing.legend_below(canvas, entries)
    arrow = ", with an arrow where it lies outside the axis." if outside else "."
    caption = (
        "Lines: training loss, the mean of the steps around each (a fifteenth of the run, 201 at most, fewer "
        "towards the ends). Marks joined by dots: validation. Grey: entropy of a "
        f"uniform and of a unigram model{arrow}{_thinned(runs, most)}"
    )
    return drawing.render(canvas, f"{title}, {unit}", caption)


def _draw(
    axes: Axes, runs: Sequence[Run], points_of: Callable[[Run], Points], most: int, first_colour: int = 0
) -> list[tuple[Any, str]]:
    """A line for each run that has points; (handle, label) of those."""
    entries = []
    for index, run in enumerate(runs, start=first_colour):
        if points := curves.thin(points_of(run), most):
            style = {"color": PALETTE[index % len(PALETTE)], "linestyle": DASHES[index % len(DASHES)]}
            marker = "." if len(points) == 1 else ""  # a curve of one point would be invisible as a line
            (line,) = axes.plot(*zip(*points, strict=True), linewidth=1.6, marker=marker, **style)
            entries.append((line, _label(run)))
    return entries


def _thinned(runs: Sequence[Run], most: int) -> str:
    longest = max((len(run.seconds) for run in runs), default=0)
    said = f" Curves of more than {most} steps are drawn as means of neighbouring steps."
    return said if longest > most else ""


def _published(entries: Sequence[Entry], key: str) -> dict[str, float]:
    """Row -> published number, of the rows that have one."""
    numbers = {entry.row.full_name: getattr(entry.row.published, key, None) for entry in entries}
    return {name: number for name, number in numbers.items() if number is not None}


def _counted_as(entries: Sequence[Entry]) -> str | None:
    """Which of our two counts stands next to the published TFLOPS; None where the sources made both."""
    published = [entry.row.published for entry in entries if entry.row.published]
    found = {each.tflops_by for each in published if each.tflops is not None} or {"formula"}
    return TFLOPS_BY[found.pop()][1] if len(found) == 1 else None


def _axis(entries: Sequence[Entry], key: str) -> str:
    """With the count of TFLOPS that the source made, and we next to it."""
    counted = _counted_as(entries) if key == "tflops" else None
    return COLUMNS[counted].heading if counted else THROUGHPUT[key]


def _measured(entry: Entry, key: str) -> float | None:
    """None also where the run's numbers are not those of the row."""
    counted = _counted_as([entry]) if key == "tflops" else key
    value = COLUMNS[counted or key].of(entry.run.result) if entry.run and not entry.no_ratio else None
    return value if value and value > 0 else None


def _entropies(runs: Sequence[Run]) -> dict[tuple[str, float], list[str]]:
    found: dict[tuple[str, float], list[str]] = {}
    for run in runs:
        for kind, value in vars(run.result.entropies).items():
            if value is not None:
                found.setdefault((kind, round(value, 4)), []).append(run.label)
    return found


def _label(run: Run) -> str:
    return run.label + (" (TINY)" if run.tiny else "")


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and max(values) > LOG_FROM * min(values)
