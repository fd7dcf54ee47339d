"""The loss curves of a run, drawn from its records."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from launch.records.facts import Entropies
from launch.records.metrics import Records, curve
from launch.records.result import Result
from recipes.families import LossFigure

if TYPE_CHECKING:
    from launch.records.reference import Reference

INK = "#1c2024"
QUIET = "#5d6670"
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
TRAINING, VALIDATION, BRANCH, *_ = PALETTE
ACROSS = ("data", "axes fraction")  # a step, and a share of the height
PANELS = 2  # figures of a model that are drawn: a BERT's two objectives
HEIGHTS = (3, 2)  # of the panels, relative to each other
MOST_NEIGHBOURS = 100  # steps on either side of a step in the moving average
SIZE = 9  # of text in the margin, points
LINE = 1.4  # distance of its lines, in font sizes
WIDTH = 125  # characters of a small line across a picture
TITLE_WIDTH = 66


class CurveName(NamedTuple):
    """A text in the margin, at its height on the y axis."""

    y: float
    text: str
    color: str


def plot_loss(
    records: Records, result: Result, out_png: Path, reference: Reference | None = None
) -> None:
    """Draw the losses of a run in training and validation, one panel for each objective.

    `reference`: the runs that it is judged by.
    """
    figures = result.figures[:PANELS]
    count = len(figures)
    # by hand: pyplot would keep a global state and ask for a display
    picture = Figure(figsize=(8, 2.8 + 2.2 * count), layout="constrained")
    ratios = HEIGHTS[:count]
    panels = picture.subplots(count, sharex=True, squeeze=False, height_ratios=ratios)
    title = textwrap.fill(result.title, TITLE_WIDTH)
    picture.suptitle(title, color=INK, weight="bold", x=0.01, ha="left")
    panels = panels[:, 0]
    panels[0].set_title(about(result), fontsize=8, color=QUIET, loc="left")
    panels[-1].set_xlabel("optimizer step", color=INK)
    for axes, figure in zip(panels, figures, strict=True):
        axes.set_ylabel(str(figure), color=INK, fontsize=9)
        draw_losses(axes, records, result, figure, reference)
    words = []
    for number, left in enumerate(records.branches, 1):
        branch = left.branch
        for axes in panels:
            axes.axvline(branch.step, color=BRANCH, linewidth=1)
            axes.annotate(
                f" {number}", (branch.step, 0.95), xycoords=ACROSS, color=BRANCH
            )
        of = f"{number}: branch of {Path(branch.run).name} from step {branch.step:,} on"
        words.append(textwrap.fill(f"{of}: {branch.changes}", WIDTH))
    if words:
        picture.supxlabel("\n".join(words), fontsize=8, color=BRANCH, x=0.01, ha="left")
    without_formulas(picture)
    picture.savefig(out_png, dpi=120)


def about(result: Result) -> str:
    """Say of a run in small lines how it was laid out, where, over how many tokens and seconds of steps."""
    parts = [result.way, str(result.hardware), result.amount]
    return textwrap.fill("  ·  ".join(filter(None, parts)), WIDTH)


def draw_losses(
    axes: Axes,
    records: Records,
    result: Result,
    figure: LossFigure,
    reference: Reference | None,
) -> None:
    """Draw a figure's training and validation curves, named in the margin with their last values.

    Thin: the loss of each step; thick: its moving average. Grey: the training losses of `reference`, or else
    the loss of a uniform and of a unigram model.
    """
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(step_ticks())
    train = curve(records.steps, figure)
    validation = curve(records.validations, figure)
    lone = "." if len(train) == 1 else ""
    names = []
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, color=TRAINING, linewidth=0.6, alpha=0.5, marker=lone)
        axes.plot(steps, moving_average(losses), color=TRAINING, linewidth=1.8)
    if validation:
        steps, losses = zip(*validation, strict=True)
        axes.plot(steps, losses, "o-", color=VALIDATION, markersize=4, linewidth=1.2)
    for split, color in (("training", TRAINING), ("validation", VALIDATION)):
        value = result.told(split, figure)
        if value is not None:
            names.append(CurveName(value, f"{split} {value:.4f}", color))
    if figure == result.figures[0]:
        if reference:
            names.append(draw_band(axes, reference, result.steps))
        else:
            names += draw_entropies(axes, result.entropies)
    write_in_margin(axes, names)


def draw_entropies(axes: Axes, entropies: Entropies) -> list[CurveName]:
    """Draw a grey line for each that lies within the axis; return the names of all."""
    bottom, top = axes.get_ylim()
    names = []
    for kind, value in vars(entropies).items():
        if value is None:
            continue
        names.append(CurveName(value, f"{kind} {value:.3f}", QUIET))
        if bottom <= value <= top:
            style = ":" if kind == "unigram" else "--"
            axes.axhline(value, color=QUIET, linestyle=style, linewidth=0.8)
    return names


def draw_band(axes: Axes, reference: Reference, steps: int) -> CurveName:
    """Draw the band of the seeds' training losses and their median; return the name of the median."""
    losses = [run.loss[:steps] for run in reference.runs.values()]
    low, median, high = np.nanquantile(losses, (0, 0.5, 1), axis=0)
    across = range(1, len(median) + 1)
    axes.fill_between(across, low, high, color=QUIET, alpha=0.2, linewidth=0)
    axes.plot(across, median, color=QUIET, linewidth=0.6)
    last = median[-1]
    return CurveName(last, f"{len(losses)} seeds {last:.4f}", QUIET)


def without_formulas(picture: Figure) -> None:
    """Show all text as it is: a $ in a title is a dollar."""
    for text in picture.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)


def moving_average(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours on both sides.

    At the beginning, where a loss falls steeply, it has equally many on both sides, so that the curve stays
    in place. The last value has those before it alone.
    """
    # 10 steps of 300 on either side, for a window of a fifteenth of the run
    reach = min(max(1, len(values) // 30), MOST_NEIGHBOURS)
    found = []
    for index in range(len(values)):
        before = min(reach, index)
        found.append(mean(values[index - before : index + before + 1]))
    return found


def mean(values: Sequence[float]) -> float:
    """Return the mean of values whose sum may be too large for a float."""
    return sum(value / len(values) for value in values)


def step_ticks() -> MaxNLocator:
    """Return a locator of ticks at round numbers of steps: 10, 20, 30."""
    return MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True)


def write_in_margin(axes: Axes, names: Sequence[CurveName]) -> None:
    """Write each name at its height on the y axis, right of the axes and without overlaps.

    An arrow marks a value above or below the axis. Call it after everything is drawn.
    """
    low, high = axes.get_ylim()
    shares = [min(max((each.y - low) / (high - low), 0), 1) for each in names]
    found = sorted(zip(shares, names, strict=True), reverse=True)
    figure = axes.get_figure(root=True)
    assert figure is not None
    inches = axes.get_window_extent().height / figure.dpi
    # between two middles, as a share of the height
    gap = LINE * SIZE / 72 / inches
    # down, away from each one above, and up again, from the lower edge
    shares = [share for share, _ in found]
    down = [*accumulate(shares, lambda above, own: min(own, above - gap))]
    up = accumulate(down[::-1], lambda below, own: max(own, below + gap), initial=-gap)
    for height, (_, name) in zip([*up][:0:-1], found, strict=True):
        arrow = " ↑" if name.y > high else ""
        if name.y < low:
            arrow = " ↓"
        axes.annotate(
            f"{name.text}{arrow}",
            (1, height),
            xytext=(5, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            fontsize=SIZE,
            color=name.color,
        )
