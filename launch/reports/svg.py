"""A matplotlib figure as SVG that stands inside a page: text is text, and ink and paper are the page's own colours."""

from __future__ import annotations

import io
import re
from html import escape

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, NullFormatter

# Stand-ins that nothing else is drawn in: replaced by the page's colours, which differ between day, night and print.
INK, FAINT, PAPER = "#010203", "#010204", "#010205"
_PAGE_COLOURS = {INK: "currentColor", FAINT: "var(--faint)", PAPER: "var(--page)"}
# Middle tones, readable on white and on near-black.
PALETTE = ("#3b82c4", "#d9822b", "#3a9d5d", "#cf4f4f", "#8f6fd1", "#9a7560", "#d06fa6", "#7f8790")


def new_figure(width: float, height: float) -> Figure:
    """Without pyplot, which would keep a global state and ask for a display; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    FigureCanvasSVG(figure)
    return figure


def new_axes(figure: Figure, title: str, x: str, y: str):
    axes = figure.add_subplot()
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


def step_axis(axes) -> None:
    """Optimizer steps are whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def log_axis(axes, which: str) -> None:
    """A logarithmic x or y axis whose numbers are plain text: 0.001, 1e-05."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def legend_below(figure: Figure, entries: list, columns: int = 2) -> None:
    """(handle, label) pairs under the axes, where they cover nothing."""
    if entries:
        # matplotlib leaves labels out that begin with an underscore.
        labels = [f" {label}" if label.startswith("_") else label for _, label in entries]
        figure.legend(
            [handle for handle, _ in entries], labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False,
            labelcolor=INK, handlelength=3,
        )  # fmt: skip


def render(figure: Figure, prefix: str, label: str) -> str:
    """One <svg> element. `prefix`: of its ids, different for each figure of a page; `label`: for those who cannot see it."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a $ in a title is a dollar
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, colour in _PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    svg = re.sub(r'(\bid="|xlink:href="#|url\(#)', lambda match: f"{match[1]}{prefix}-", svg)
    opening = re.match(r"<svg[^>]*>", svg)
    assert opening, "matplotlib wrote no <svg>"
    box = re.search(r'viewBox="([^"]+)"', opening[0])
    assert box, "matplotlib wrote no viewBox"
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return (
        f'<svg {namespaces} viewBox="{box[1]}" role="img" aria-label="{escape(label)}">{svg[opening.end() :]}'
    )
