"""A picture of a forecast: memory of each pipeline stage, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from launch.planning.prediction.forecast import Forecast
from launch.planning.prediction.forecast_text import CATEGORIES, CAUSES
from launch.planning.prediction.step_time import StepTime
from launch.planning.prediction.timeline import Span

PARTS = {**CATEGORIES, "fragmentation": "kept by torch's allocator", "context": "context, imported libraries"}
PASSES = {"forward": "tab:blue", "backward": "tab:green"}
AFTER = {"data": "tab:orange", "offload": "tab:red", "update": "tab:purple"}  # the passes
MOST_NUMBERED = 200  # spans with the number of their micro-batch


def draw(found: Forecast, spans: Sequence[Span], name: str, path: Path) -> None:
    """Draw the stages' memory, and below it the timeline where a time is predicted."""
    stages = len(found.stages)
    panels = 2 if found.time else 1
    figure = Figure(figsize=(11, panels * (2.4 + 0.12 * min(stages, 24))), layout="constrained")
    FigureCanvasAgg(figure)
    memory, *rest = figure.subplots(panels, 1, squeeze=False)[:, 0]
    _memory(memory, found)
    for axes in rest:
        assert found.time
        _timeline(axes, found.time, spans, stages)
    figure.suptitle(f"{name}: {found.work.layout.degrees()}, predicted", fontsize=10)
    figure.savefig(path, dpi=110)


def _memory(axes: Axes, found: Forecast) -> None:
    places, left = range(len(found.stages)), [0.0] * len(found.stages)
    for number, (key, label) in enumerate(PARTS.items()):
        sizes = [rank.on_gpu[key] / 1e9 for rank in found.stages]
        if any(sizes):
            axes.barh(places, sizes, left=left, label=label, color=colormaps["tab10"](number), height=0.8)
            left = [before + size for before, size in zip(left, sizes, strict=True)]
    room = found.node.gpu.memory_bytes / 1e9
    axes.axvline(room, color="black", linestyle="--", linewidth=1, label=f"{room:.1f} GB there are")
    _stages(axes, "GB per rank at its fullest", len(found.stages))


def _timeline(axes: Axes, time: StepTime, spans: Sequence[Span], stages: int) -> None:
    few = len(spans) <= MOST_NUMBERED
    for (kind, colour), stage in product(PASSES.items(), range(stages)):
        own = [(span.start, span.seconds) for span in spans if (span.stage, span.kind) == (stage, kind)]
        bars = axes.broken_barh(own, (stage - 0.4, 0.8), color=colour, edgecolor="white", lw=0.3 * few)
        if stage == 0:
            bars.set_label(f"{kind} pass")
    end = max(span.start + span.seconds for span in spans)
    for cause, colour in AFTER.items():
        if after := time.split[cause]:
            axes.barh(range(stages), after, left=end, height=0.8, color=colour, label=CAUSES[cause])
            end += after
    for span in spans if few else ():
        place = span.start + span.seconds / 2, span.stage
        axes.text(*place, str(span.micro_batch), ha="center", va="center", fontsize=6)
    even = f"{end:.3g}" == f"{time.total:.3g}"
    slowest = "" if even else f" ({time.total:.4g} with every stage as slow as the slowest)"
    _stages(axes, f"seconds of a step: {end:.4g}{slowest}; white: waiting", stages)


def _stages(axes: Axes, what: str, stages: int) -> None:
    axes.set(xlabel=what, ylabel="pipeline stage", ylim=(stages - 0.5, -0.5))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
