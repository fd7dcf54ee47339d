"""A plot of predicted against published numbers, one point per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launch.planning.fitting.fitting import Ratio
from launch.planning.fitting.validation import Validation, shortened
from launch.planning.prediction.hardware import GIB

BAND = 0.15  # around the diagonal: the error that the planner aims at


def draw(found: Validation, path: Path) -> None:
    """Draw seconds per iteration (logarithmic) and cached memory, with a colour for each document."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2)
    colour = {name: colormaps["tab20"](i % 20) for i, name in enumerate(found.tables)}
    _panel(times, found.ratios["time"], "seconds per iteration", 1.0, colour)
    times.set(xscale="log", yscale="log")
    _panel(memory, found.ratios["memory"], "cached memory, GiB per GPU", GIB, colour)
    names = dict.fromkeys(ratio.case.document for name in ("time", "memory") for ratio in found.ratios[name])
    dots = dict(marker="o", linestyle="", markersize=5)
    handles = [times.plot([], [], color=colour[each], label=shortened(each), **dots)[0] for each in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    figure.suptitle("predicted by constants that never saw the document; the band is 15 %", fontsize=10)
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, ratios: Sequence[Ratio], what: str, unit: float, colour: Mapping[str, Any]) -> None:
    for ratio in ratios:
        x, y = ratio.published / unit, ratio.predicted / unit
        axes.plot(x, y, "o", markersize=3.5, alpha=0.8, color=colour[ratio.case.document])
    published = [ratio.published / unit for ratio in ratios] or [1.0]
    ends = [min(published), max(published)]
    low, high = ([end * (1 + error) for end in ends] for error in (-BAND, BAND))
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    axes.fill_between(ends, low, high, color="gray", alpha=0.15)
    axes.set_xlabel(f"published {what}")
    axes.set_ylabel(f"predicted {what}")
    axes.grid(alpha=0.2)
