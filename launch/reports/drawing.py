"""A matplotlib figure as an SVG image that follows its page from day to night."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Drawing
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullLocator

from launch.records.loss_plot import step_ticks, write_in_margin

# Stand-ins that nothing else is drawn in, for colours that differ between day and night. As in style.css.
INK, FAINT = "#010203", "#010204"
STYLE = (
    "<style>:root{--ink:#1c2024;--faint:#c3c9cf}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e4e7ea;--faint:#48515a}}</style>"
)
# Middle tones, readable on white and on near-black.
PALETTE = ("#3b82c4", "#d9822b", "#3a9d5d", "#cf4f4f", "#8f6fd1", "#9a7560", "#d06fa6", "#7f8790")

# Of the curves' own range: a reference further away is named at the edge, and takes nothing of the axis.
NEAR = 0.5
LEAST_TICKS = 3  # of a logarithmic axis
LEAST_RANGE = 0.2  # nats: curves that are flat are no reason to call a reference far away


@dataclass(frozen=True)
class Figure:
    """One plot. `label`: for those who cannot see it; `caption`: what is drawn, and what is left out."""

    svg: str
    label: str
    caption: str

    @property
    def address(self) -> str:
        """The image itself, as the address of an <img>."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"


def new_drawing(width: float, height: float) -> Drawing:
    """Without pyplot, which would keep a global state and ask for a display; sizes in inches."""
    drawing = Drawing(figsize=(width, height), layout="constrained", facecolor="none")
    FigureCanvasSVG(drawing)
    return drawing


def new_axes(drawing: Drawing, title: str, x: str, y: str) -> Axes:
    axes = drawing.add_subplot()
    axes.set_facecolor("none")
    axes.set_title(title, fontsize=11, color=INK)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.tick_params(colors=INK, which="both")
    axes.grid(alpha=0.5, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_color(FAINT)
    return axes


def step_axes(drawing: Drawing, title: str, y: str) -> Axes:
    """Axes over optimizer steps, which are whole numbers."""
    axes = new_axes(drawing, title, "optimizer step", y)
    axes.xaxis.set_major_locator(step_ticks())
    return axes


def log_axis(axes: Axes, which: str) -> None:
    """A logarithmic x or y axis whose numbers are plain text: 0.001, 1e-05."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogTicks())
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


class LogTicks(Locator):
    """Ticks of a logarithmic axis: decades, in between 2 and 5 where these are few, and whatever is round."""

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        low, high = self.axis.get_view_interval()
        return self.tick_values(low, high)

    def tick_values(self, low: float, high: float) -> Sequence[float]:
        found: list[float] = []
        for locator in (LogLocator(numticks=9), LogLocator(subs=(1, 2, 5), numticks=9), MaxNLocator(6)):
            found = [float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high]
            if len(found) >= LEAST_TICKS:
                break
        return found


def legend_below(drawing: Drawing, entries: Sequence[tuple[Any, str]], columns: int = 2) -> None:
    """(handle, label) pairs under the axes, where they cover nothing."""
    if entries:
        # matplotlib leaves labels out that begin with an underscore.
        labels = [f" {label}" if label.startswith("_") else label for _, label in entries]
        style: dict[str, Any] = {"fontsize": 9, "frameon": False, "labelcolor": INK, "handlelength": 3}
        handles = [handle for handle, _ in entries]
        drawing.legend(handles, labels, loc="outside lower center", ncols=columns, **style)


def draw_references(axes: Axes, entropies: Mapping[tuple[str, float], Sequence[str]], runs: int) -> bool:
    """Draw a grey line for each (kind, nats) -> labels of its runs; name it in the margin.

    Call it after the curves are drawn. `runs`: how many they are of; a reference of one of several names it.
    Returns whether one lies outside the axis.
    """
    values = [float(y) for line in axes.get_lines() for y in np.asarray(line.get_ydata())]
    bottom, top = (min(values), max(values)) if values else (0.0, float("inf"))
    reach = NEAR * max(top - bottom, LEAST_RANGE)
    labels, outside = [], False
    for (kind, value), names in entropies.items():
        whose = f"\n{names[0]}" if len(names) < runs and len(names) == 1 else ""
        labels.append((value, f"{kind} {value:.3f}{whose}"))
        if bottom - reach <= value <= top + reach:
            axes.axhline(value, color=FAINT, linestyle=":" if kind == "unigram" else "--", linewidth=1.2)
        else:
            outside = True
    write_in_margin(axes, labels, INK, 8)
    return outside


def render(drawing: Drawing, label: str, caption: str) -> Figure:
    for text in drawing.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)  # a $ in a title is a dollar
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        drawing.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = buffer.getvalue()
    opening = svg.index(">", svg.index("<svg")) + 1
    svg = f"{svg[svg.index('<svg') : opening]}{STYLE}{svg[opening:]}"
    return Figure(svg.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)"), label, caption)
