"""Predicted against published, one point per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launch.planning.fitting.fitting import Ratio
from launch.planning.fitting.validation import Validation
from launch.planning.prediction.hardware import GIB

BAND = 0.15  # around the diagonal: the error that the planner aims at


def draw(found: Validation, path: Path) -> None:
    """Two panels, seconds per iteration (logarithmic) and cached memory; a colour for each document."""
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    times, memory = figure.subplots(1, 2)
    colours = colormaps["tab20"]
    colour = {name: colours(i % 20) for i, name in enumerate(found.documents)}
    _panel(times, found.time, "seconds per iteration", 1.0, colour.__getitem__)
    times.set(xscale="log", yscale="log")
    _panel(memory, found.memory, "cached memory, GiB per GPU", GIB, colour.__getitem__)
    names = dict.fromkeys(ratio.case.document for ratio in (*found.time, *found.memory))
    handles = [
        times.plot([], [], "o", markersize=5, color=colour[name], label=_short(name))[0] for name in names
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    figure.suptitle("predicted by constants that never saw the document; the band is 15 %", fontsize=10)
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, ratios: Sequence[Ratio], what: str, unit: float, colour: Callable[[str], Any]) -> None:
    for ratio in ratios:
        x, y = ratio.published / unit, ratio.predicted / unit
        axes.plot(x, y, "o", markersize=3.5, alpha=0.8, color=colour(ratio.case.document))
    ends = [
        min((r.published for r in ratios), default=unit) / unit,
        max((r.published for r in ratios), default=unit) / unit,
    ]
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    axes.fill_between(
        ends, [e * (1 - BAND) for e in ends], [e * (1 + BAND) for e in ends], color="gray", alpha=0.15
    )
    axes.set_xlabel(f"published {what}")
    axes.set_ylabel(f"predicted {what}")
    axes.grid(alpha=0.2)


def _short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[:most]}…"
