"""The card of a run: what was trained, how, and what came out, in one picture for a README or a post."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from launch.console.text_table import duration, number
from launch.records.loss_plot import INK, QUIET, draw_losses, without_formulas
from launch.records.metrics import Records
from launch.records.result import HeldOutLoss, Result

SIZE = (12, 6.3)  # inches of 100 pixels, as sites show a link: 1200 x 630
CURVE = (0.065, 0.3, 0.42, 0.52)  # left, bottom, width and height, in shares
FACTS = 0.64  # from the left, share
LINE = 0.08  # of a fact with its name, share of the height
TEXT_LINE = 0.034  # of a fact's second line
VALUE_WIDTH = 46  # characters
TITLE_WIDTH = 70
SAMPLE_WIDTH = 118
SAMPLE_LINES = 3


def draw_card(
    records: Records, result: Result, out: Path, usd_per_gpu_hour: float | None = None
) -> None:
    """Draw the card of a run; `usd_per_gpu_hour`: the price of one of its processes."""
    card = Figure(figsize=SIZE, dpi=100)
    FigureCanvasAgg(card)
    title = shortened(result.title, TITLE_WIDTH, 1)
    card.text(0.03, 0.95, title, fontsize=21, weight="bold", color=INK, va="top")
    figure = result.figures[0]
    axes = card.add_axes(CURVE)
    axes.set_title(str(figure), loc="left", fontsize=10, color=QUIET)
    axes.set_xlabel("optimizer step", fontsize=10, color=QUIET)
    draw_losses(axes, records, result, figure, size=10)
    y = 0.85
    for name, value in facts(result, usd_per_gpu_hour):
        text = shortened(value, VALUE_WIDTH, 2)
        card.text(FACTS, y, name, fontsize=9, color=QUIET, va="top")
        card.text(FACTS, y - 0.028, text, fontsize=11, color=INK, va="top")
        y -= LINE + TEXT_LINE * text.count("\n")
    if result.sample and drawable(result.sample):
        sample = shortened(result.sample, SAMPLE_WIDTH, SAMPLE_LINES)
        card.text(0.03, 0.19, "sample", fontsize=9, color=QUIET, va="top")
        how: dict[str, Any] = {"style": "italic", "va": "top", "linespacing": 1.35}
        card.text(0.03, 0.155, sample, fontsize=11.5, color=INK, **how)
    made = f"{result.recipe}, trained by megarecipes"
    card.text(0.97, 0.02, made, fontsize=9, color=QUIET, ha="right")
    without_formulas(card)
    card.savefig(out, format="png")


def facts(result: Result, usd_per_gpu_hour: float | None) -> Iterator[tuple[str, str]]:
    """Yield the lines beside the curve: losses or scores, and how the run was made."""
    if result.status != "ok":
        yield "status", f"{result.status} after {result.steps:,} steps"
    found = result.losses.validation or HeldOutLoss()
    for figure in result.figures[:2]:
        value = figure.of(found)
        if value is not None:
            yield f"validation {figure.name}", f"{value:.4f} {figure.unit}"
    for score in result.task_scores:
        yield f"score on {score.split}", str(score)
    yield "layout", result.way
    yield "hardware", str(result.hardware)
    speed = result.speed
    if speed.tokens_per_s is not None:
        rates = f"{number(speed.tokens_per_s)} tokens/s"
        yield "speed", f"{rates}, {number(speed.seconds_per_step)} s per step"
    if result.tokens is None or result.seconds is None:
        return
    trained = f"{result.steps:,} steps, {result.tokens:,} tokens"
    yield "trained for", f"{trained}, {duration(result.seconds)}"
    if usd_per_gpu_hour is not None and result.layout:
        hours = result.layout.world * result.seconds / 3600
        yield (
            "cost",
            f"${number(hours * usd_per_gpu_hour)} at ${usd_per_gpu_hour:g} a GPU-hour",
        )


def shortened(text: str, width: int, lines: int) -> str:
    """Break a text into so many lines at most, with an ellipsis where words are left out."""
    return textwrap.fill(
        " ".join(text.split()), width, max_lines=lines, placeholder=" …"
    )


def drawable(text: str) -> bool:
    """Check that the picture's font has every character of a text."""
    font = get_font(findfont("DejaVu Sans"))
    return all(font.get_char_index(ord(each)) for each in text if not each.isspace())
