"""A picture of a forecast: memory of each pipeline stage, and when it computes in a step under 1F1B."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from launch.planning.prediction.forecast import Forecast
from launch.planning.prediction.forecast_text import CATEGORIES, CAUSES
from launch.planning.prediction.step_time import NodeRates, StageTimes, StepTime

Pass = Literal["forward", "backward"]
PARTS = {**CATEGORIES, "fragmentation": "kept by torch's allocator", "context": "context, imported libraries"}
PASSES = {"forward": "tab:blue", "backward": "tab:green"}
AFTER = {"data": "tab:orange", "offload": "tab:red", "update": "tab:purple"}  # the passes
MOST_NUMBERED = 200  # spans with the number of their micro-batch


def draw(found: Forecast, name: str, path: Path) -> None:
    """Draw the stages' memory, and below it the timeline where a time is predicted."""
    stages = len(found.stages)
    panels = 2 if found.time else 1
    figure = Figure(figsize=(11, panels * (2.4 + 0.12 * min(stages, 24))), layout="constrained")
    FigureCanvasAgg(figure)
    memory, *rest = figure.subplots(panels, 1, squeeze=False)[:, 0]
    _memory(memory, found)
    if found.time:
        _timeline(rest[0], found.time, timeline(found), stages)
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


class Span(NamedTuple):
    """A pass of a micro-batch on a stage, in seconds from the start of the step."""

    stage: int
    micro_batch: int
    kind: Pass
    start: float
    seconds: float


def order(stage: int, stages: int, count: int) -> list[tuple[Pass, int]]:
    """Return a stage's passes in their order (Narayanan et al. 2021, section 2.2.1)."""
    ahead, found = min(stages - stage - 1, count), list[tuple[Pass, int]]()
    for number in range(-ahead, count):
        if number + ahead < count:
            found.append(("forward", number + ahead))
        if number >= 0:
            found.append(("backward", number))
    return found


def timeline(of: Forecast) -> list[Span]:
    """Predict when each pass begins: after the stage's last one, and the neighbour's of this micro-batch."""
    work, stages = of.work, of.work.layout.pp
    times = StageTimes(work, NodeRates(of.node, of.constants, work.layout.world))
    # A backward pass is two forward ones, and a third where it recomputes.
    of_stage = [times.of_stage(stage).total for stage in range(stages)]
    forward = [seconds / (3 + times.again) for seconds in of_stage]
    waiting = [order(stage, stages, work.layout.accumulation)[::-1] for stage in range(stages)]
    ends: dict[tuple[int, Pass, int], float] = {}
    free, found = [0.0] * stages, []
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                kind, number = passes[-1]
                before = stage - 1 if kind == "forward" else stage + 1
                ready = ends.get((before, kind, number)) if 0 <= before < stages else 0.0
                if ready is None:
                    break
                start = max(free[stage], ready)
                seconds = forward[stage] if kind == "forward" else of_stage[stage] - forward[stage]
                found.append(Span(stage, number, kind, start, seconds))
                free[stage] = ends[stage, kind, number] = start + seconds
                passes.pop()
    return found
