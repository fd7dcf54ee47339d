"""The card of a run: what was trained, how, and what came out, in one picture for a README or a post."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from launch.console.text_table import loss, number
from launch.records.loss_plot import INK, PANELS, QUIET, draw_losses, without_formulas
from launch.records.metrics import Records, stretches
from launch.records.result import Result
from recipes.problems import counted

if TYPE_CHECKING:
    from launch.records.reference import Reference

SIZE = (12, 6.3)  # inches of 100 pixels, as sites show a link: 1200 x 630
CURVE = (0.065, 0.3, 0.42, 0.52)  # left, bottom, width and height, in shares
FACTS = 0.64  # from the left
LINE = 0.078  # height of a fact with its name
TEXT_LINE = 0.033  # of each further line
VALUE_WIDTH = 48  # characters
SAMPLE_WIDTH = 118


def draw_card(
    records: Records,
    result: Result,
    out: Path,
    usd_per_gpu_hour: float | None = None,
    reference: Reference | None = None,
) -> None:
    """Draw the card of a run; `usd_per_gpu_hour`: the price of one of its processes.

    `reference`: the runs that it is judged by.
    """
    card = Figure(figsize=SIZE, dpi=100)
    write = partial(card.text, color=INK, va="top")
    named = partial(write, color=QUIET, fontsize=9)
    write(0.03, 0.95, shortened(result.title, 70, 1), fontsize=21, weight="bold")
    figure = result.figures[0]
    axes = card.add_axes(CURVE)
    axes.set_title(str(figure), loc="left", fontsize=10, color=QUIET)
    axes.set_xlabel("optimizer step", fontsize=10, color=QUIET)
    draw_losses(axes, records, result, figure, reference)
    facts = [] if result.status == "ok" else [("status", result.status)]
    for each in result.figures[:PANELS]:
        text = f"{loss(result.told('validation', each))} {each.unit}"
        facts.append((f"validation {each.name}", text))
    facts += [(f"score on {each.split}", str(each)) for each in result.task_scores]
    per_second = number(result.speed.tokens_per_s)
    per_step = number(result.speed.seconds_per_step)
    facts += [
        ("layout", result.way),
        ("hardware", str(result.hardware)),
        ("speed", f"{per_second} tokens/s, {per_step} s per step"),
        ("trained for", f"{counted(result.steps, 'step')}, {result.amount}"),
    ]
    if usd_per_gpu_hour and records.launches:
        usd = usd_per_gpu_hour * process_seconds(records) / 3600
        cost = f"${usd:,.2f} at ${usd_per_gpu_hour:g} an hour of a process"
        facts.append(("cost", cost))
    y = 0.85
    for name, text in facts:
        value = shortened(text, VALUE_WIDTH, 2)
        named(FACTS, y, name)
        write(FACTS, y - 0.028, value, fontsize=11)
        y -= LINE + TEXT_LINE * value.count("\n")
    if result.sample and drawable(result.sample):
        named(0.03, 0.19, "sample")
        sample = shortened(result.sample, SAMPLE_WIDTH, 3)
        write(0.03, 0.155, sample, fontsize=11.5, style="italic", linespacing=1.35)
    named(0.97, 0.04, f"{result.recipe}, trained by megarecipes", ha="right")
    without_formulas(card)
    card.savefig(out, format="png")


def process_seconds(records: Records) -> float:
    """Return the seconds of the run's own steps, each as often as its launch had processes."""
    total = 0.0
    for stretch in stretches(records):
        if stretch.how:
            seconds = sum(record.seconds for record in stretch.steps)
            total += seconds * stretch.how.layout.world
    return total


def shortened(text: str, width: int, lines: int) -> str:
    """Break a text into so many lines at most, with an ellipsis where words are left out."""
    return textwrap.fill(
        " ".join(text.split()), width, max_lines=lines, placeholder=" …"
    )


def drawable(text: str) -> bool:
    """Check that the picture's font has every character of a text."""
    font = get_font(findfont("DejaVu Sans"))
    return all(font.get_char_index(ord(each)) for each in text if not each.isspace())
