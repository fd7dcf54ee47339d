"""The loss curve of a run, drawn from its records."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from launch.records.metrics import Records, curve
from recipes.families import LossFigure
from recipes.schema import Branch

LABEL_WIDTH = 48  # characters along the line of a branch
LABEL_LINES = 3
MOST_NEIGHBOURS = 100  # steps on either side of a step in the moving average
LINE = 1.4  # distance of lines of text in the margin, in font sizes


def plot_loss(
    records: Records,
    out_png: Path,
    reference_lines: Mapping[str, float],
    figure: LossFigure,
    title: str = "",
) -> None:
    """Draw a loss in training, its moving average, validation points and reference lines.

    `reference_lines`: label -> nats, such as the entropies of a uniform and a unigram model.
    """
    train = curve(records.steps, figure)
    validation = curve(records.validations, figure)
    # Figure and canvas by hand: pyplot would keep a global state and ask for a display.
    picture = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(
            steps,
            losses,
            linewidth=0.6,
            alpha=0.5,
            color="tab:blue",
            label="training, each step",
        )
        label = average_label(len(losses))
        axes.plot(
            steps, moving_average(losses), linewidth=1.8, color="tab:blue", label=label
        )
    if validation:
        axes.plot(
            *zip(*validation, strict=True),
            "o-",
            markersize=4,
            color="tab:orange",
            label="validation",
        )
    for left in records.branches:
        mark_branch(axes, left.branch)
    for value, style in zip(
        reference_lines.values(), itertools.cycle(("--", ":", "-.")), strict=False
    ):
        axes.axhline(value, linestyle=style, color="gray", linewidth=1)
    write_in_margin(
        axes,
        [(value, f"{label} {value:.2f}") for label, value in reference_lines.items()],
        "gray",
    )
    axes.xaxis.set_major_locator(step_ticks())
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(str(figure))
    axes.set_title(title)
    axes.grid(alpha=0.2)
    if train or validation:
        axes.legend(loc="upper right")
    picture.savefig(out_png, dpi=120)


def mark_branch(axes: Axes, branch: Branch) -> None:
    """Draw a line where a branch begins, and write along it whose it is and what it changes."""
    axes.axvline(branch.step, color="tab:green", linewidth=1.2)
    text = f"branch of {Path(branch.run).name} from step {branch.step:,} on: {branch.changes}"
    label = textwrap.fill(text, LABEL_WIDTH, max_lines=LABEL_LINES, placeholder=" …")
    across = axes.get_xaxis_transform()
    how: dict[str, Any] = dict(
        rotation=90, ha="right", va="bottom", ma="left", fontsize=7
    )
    axes.text(
        branch.step, 0.01, f"{label} ", transform=across, color="tab:green", **how
    )


def moving_average(values: Sequence[float]) -> list[float]:
    """Average each value with equally many neighbours on both sides, so that a falling curve stays in place.

    The number of neighbours falls to 0 towards both ends.
    """
    reach = _reach(len(values))
    last = len(values) - 1
    around = (min(reach, index, last - index) for index in range(len(values)))
    return [mean(values[index - n : index + n + 1]) for index, n in enumerate(around)]


def mean(values: Sequence[float]) -> float:
    """Return the mean of values whose sum may be too large for a float."""
    return sum(value / len(values) for value in values)


def average_label(count: int) -> str:
    """Return the label of the moving average over `count` steps."""
    return f"training, mean of the {2 * _reach(count) + 1} steps around (fewer towards the ends)"


def _reach(count: int) -> int:
    """Return the neighbours on either side: 10 of 300 steps, for a window of a fifteenth of the run."""
    return min(max(1, count // 30), MOST_NEIGHBOURS)


def step_ticks() -> MaxNLocator:
    """Return a locator of ticks at round numbers of steps: 10, 20, 30."""
    return MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True)


def write_in_margin(
    axes: Axes, labels: Sequence[tuple[float, str]], color: str, size: float = 9
) -> None:
    """Write each text at its height on the y axis, right of the axes and without overlaps.

    An arrow marks a value above or below the axis. Call it after everything is drawn.
    """
    low, high = axes.get_ylim()
    found = sorted(
        ((min(max((y - low) / (high - low), 0), 1), y, text) for y, text in labels),
        reverse=True,
    )
    rows = max((1 + text.count("\n") for _, _, text in found), default=1)
    figure = axes.get_figure(root=True)
    assert figure is not None
    inches = axes.get_window_extent().height / figure.dpi
    # between two middles, as a share of the height
    gap = LINE * size * rows / 72 / inches
    heights: list[float] = []
    for height, _, _ in found:  # down, away from each one above
        heights.append(min([height, *(above - gap for above in heights[-1:])]))
    lowest = 0.0
    for index in reversed(range(len(heights))):  # and up again, from the lower edge
        heights[index] = max(heights[index], lowest)
        lowest = heights[index] + gap
    at: dict[str, Any] = {
        "xycoords": "axes fraction",
        "xytext": (5, 0),
        "textcoords": "offset points",
    }
    for height, (_, y, text) in zip(heights, found, strict=True):
        arrow = " ↑" if y > high else ""
        if y < low:
            arrow = " ↓"
        axes.annotate(
            f"{text}{arrow}", (1, height), fontsize=size, color=color, va="center", **at
        )
