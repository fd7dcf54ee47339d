"""What sharing the work between processes costs: rates and overhead by kind, and how they scale."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.console.text_table import table
from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.step_speed import Measured
from recipes.layout import Layout

MICRO_BATCHES = 8  # of the pipeline
WEAK, STRONG = "weak", "strong"


@dataclass(frozen=True)
class Case:
    """A layout, and the one that does the same work in one process."""

    spec: Specification
    reference: str
    bubble: float = 0.0  # share of the time in which the pipeline's schedule has nothing to do for a stage


@dataclass(frozen=True)
class Overhead:
    """Where a step's seconds go beyond those that the reference needs for its tokens on the same cores.

    Attributes:
        rate: tokens per second over those of the reference.
        ideal: seconds that the reference needs for as many tokens.
        bubble: in which the schedule of the pipeline has nothing to do.
        waiting: for other ranks and for their tensors, beyond that; the mean of the ranks.
        computing: the rest: smaller products, work that is done twice, cores and memory that are shared.
    """

    name: str
    seconds: float
    tokens_per_s: float
    rate: float
    ideal: float
    bubble: float
    waiting: float
    computing: float


def cases(spec: Specification, layout: Layout) -> list[Case]:
    """TP2, DP2 and PP2 next to one process of `layout`, each rank with half of its cores.

    DP2 has a global batch twice as large; PP2, and one process for it, MICRO_BATCHES micro-batches.
    """

    def case(name: str, degree: str, samples: int, reference: str = "", bubble: float = 0.0) -> Case:
        batch = batch_of(samples, layout)
        degrees = (f"parallel.{degree}=2",) if degree else ()
        config = "pipeline" if degree == "pp" else spec.ds_config
        settings = (*spec.settings, *batch, *degrees)
        made = replace(spec, name=name, settings=settings, ds_config=config, processes=2 if degree else 1)
        return Case(made, reference or name, bubble)

    one, many, samples = "one process", f"one process, {MICRO_BATCHES} micro-batches", layout.global_batch
    piped = layout.micro * MICRO_BATCHES
    return [
        case(one, "", samples),
        case("tp2", "tp", samples, one),
        case("dp2", "dp", 2 * samples, one),
        case(many, "", piped),
        case(f"pp2, {MICRO_BATCHES} micro-batches", "pp", piped, many, 1 / (MICRO_BATCHES + 1)),
    ]


def batch_of(samples: int, layout: Layout) -> tuple[str, ...]:
    """Settings of a global batch in the micro-batches of `layout`."""
    return (f"batch.global={samples}", f"batch.micro={layout.micro}", "batch.accumulation=null")


def overheads(measured: Sequence[Measured], found: Sequence[Case]) -> list[Overhead]:
    """The overhead of every case of which it and its reference were measured."""
    by_name = {each.spec.name: each for each in measured if each.seconds}
    rows = []
    for case in found:
        own, reference = by_name.get(case.spec.name), by_name.get(case.reference)
        if own is None or reference is None:
            continue
        seconds, tokens = statistics.median(own.seconds), statistics.mean(own.tokens)
        rate = tokens / seconds
        reference_rate = statistics.mean(reference.tokens) / statistics.median(reference.seconds)
        ideal, bubble = tokens / reference_rate, seconds * case.bubble
        shares = [rank.get("communication", 0.0) / rank["step"] for rank in own.phases]
        waiting = max(0.0, seconds * statistics.mean(shares or [0.0]) - bubble)
        computing = seconds - ideal - bubble - waiting
        rows.append(
            Overhead(case.spec.name, seconds, rate, rate / reference_rate, ideal, bubble, waiting, computing)
        )
    return rows


def overhead_table(rows: Sequence[Overhead]) -> str:
    headings = ("", "tokens/s", "rate", "s/step", "ideal", "bubble", "waiting", "computing")
    cells = [
        (row.name, f"{row.tokens_per_s:,.0f}", f"{row.rate:.0%}", f"{row.seconds:.3f}", f"{row.ideal:.3f}")
        + tuple(f"{value:+.3f}" for value in (row.bubble, row.waiting, row.computing))
        for row in rows
    ]
    return table(cells, headings, "lrrrrrrr")


def sizes(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most`."""
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


def scaled(spec: Specification, layout: Layout, most: int, kinds: Sequence[str]) -> list[Specification]:
    """Data parallelism on more and more processes, of which each has one core or one GPU.

    Weak: each has the micro-batches of `layout`, which is of one process. Strong: they share those of `most`.
    """
    found = []
    for kind in kinds:
        for count in sizes(most):
            samples = layout.global_batch * (count if kind == WEAK else most)
            settings = (*batch_of(samples, layout), f"parallel.dp={count}")
            named = replace(spec, name=f"{kind}, {count}", processes=count, threads=1)
            found.append(replace(named, settings=(*spec.settings, *settings)))
    return found


def efficiencies(measured: Sequence[Measured]) -> dict[str, dict[int, float]]:
    """Kind of scaling -> processes -> tokens per second and process, over those of the fewest."""
    rates: dict[str, dict[int, float]] = {}
    for each in measured:
        if each.seconds:
            rate = statistics.mean(each.tokens) / statistics.median(each.seconds) / each.spec.processes
            rates.setdefault(each.spec.name.split(",")[0], {})[each.spec.processes] = rate
    return {kind: {n: rate / of[min(of)] for n, rate in of.items()} for kind, of in rates.items()}


def draw_scaling(found: dict[str, dict[int, float]], out: Path, title: str) -> None:
    """Efficiency over the number of processes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, of in found.items():
        counts = sorted(of)
        axes.plot(counts, [of[count] for count in counts], "o-", label=f"{kind} scaling")
    axes.axhline(1, color="gray", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("processes")
    axes.set_ylabel("tokens per second and process, over those of the fewest")
    axes.set_title(title, fontsize=8)
    axes.legend()
    figure.savefig(out, dpi=120)
