"""Cost of parallel layouts: rates, and overhead by kind."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.console.text_table import table
from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.step_speed import Measurement
from recipes.layout import Layout

MICRO_BATCHES = 8  # of the pipeline


@dataclass(frozen=True)
class SpeedCase:
    """A layout, and the name of its one-process reference with the same work."""

    spec: Specification
    reference: str
    bubble: float = 0.0  # share of a stage's idle time in the pipeline schedule


@dataclass(frozen=True)
class Overhead:
    """Seconds of a step beyond the reference's seconds for as many tokens on the same cores.

    Attributes:
        rate: tokens per second, relative to the reference.
        ideal: seconds of the reference for as many tokens.
        bubble: idle seconds in the pipeline schedule.
        waiting: further seconds of waiting for other ranks and their tensors; mean of the ranks.
        computing: the rest: smaller products, repeated work, shared cores and memory.
    """

    name: str
    seconds: float
    tokens_per_s: float
    rate: float
    ideal: float
    bubble: float
    waiting: float
    computing: float


def cases(spec: Specification, layout: Layout) -> list[SpeedCase]:
    """Return TP2, DP2 and PP2 with their one-process references; each rank has half of the cores.

    DP2 has twice the global batch. PP2 and its reference have MICRO_BATCHES micro-batches.
    """

    def case(name: str, degree: str, samples: int, reference: str = "", bubble: float = 0.0) -> SpeedCase:
        batch = batch_of(samples, layout)
        degrees = (f"parallel.{degree}=2",) if degree else ()
        config = "pipeline" if degree == "pp" else spec.ds_config
        settings = (*spec.settings, *batch, *degrees)
        made = replace(spec, name=name, settings=settings, ds_config=config, processes=2 if degree else 1)
        return SpeedCase(made, reference or name, bubble)

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
    """Return the settings of a global batch with the micro-batch size of `layout`."""
    return (f"batch.global={samples}", f"batch.micro={layout.micro}", "batch.accumulation=null")


def overheads(measured: Sequence[Measurement], found: Sequence[SpeedCase]) -> list[Overhead]:
    """Return the overhead of every case measured together with its reference."""
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
