"""Text and plot of `benchmark.py step`: speeds, phases, profile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from launch.console.text_table import table
from recipes.problems import counted
from tools.benchmarks.step_speed import Measurement, SpeedRow, median_rates

PARTS = ("data", "forward", "backward", "optimizer")
# Within these: gradients taken to where they are stepped, their norm, AdamW, weights rounded and gathered.
WITHIN = ("copies", "norm", "update", "rounding", "communication")


def speeds(rows: Sequence[SpeedRow]) -> str:
    """Return a table with a row per system."""
    headings = (
        "",
        "s/step",
        "fastest",
        "tokens/s",
        "TFLOP/s",
        "of square",
        "of products",
        "peak GB",
        "time",
    )
    cells = [_cells(row) for row in rows]
    return f"{table(cells, headings, 'lrrrrrrrr')}\n(s/step: the median; time: over that of {rows[0].name})"


def _cells(row: SpeedRow) -> tuple[str, ...]:
    peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.2f}"
    return (
        row.name,
        f"{row.seconds:.4f}",
        f"{row.fastest:.4f}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.tflops:.3f}",
        percent(row.share),
        percent(row.product_share),
        peak,
        f"{row.times:.2f}x",
    )


def disturbance(measured: Sequence[Measurement]) -> str:
    """Return a line with the load by other programs, needed to judge the timings."""
    shares = [share for each in measured for share in each.others]
    if not shares:
        return ""
    median = statistics.median(shares)
    most = max(shares)
    return f"other programs had {median:.0%} of the cores in the median turn, {most:.0%} in the worst"


def rates(measured: Sequence[Measurement]) -> str:
    """Return a line with the machine's matrix rates, medians over the blocks."""
    found = median_rates(measured)
    if found is None:
        return "the machine's matrix rate was not measured"
    square, products = (rate / 1e12 for rate in found)
    spread = [rate["square"] / 1e12 for each in measured for rate in each.rates]
    return (
        f"matrix rate: {square:.3f} TFLOP/s in large square products ({min(spread):.3f} to {max(spread):.3f} "
        f"in {len(spread)} blocks), {products:.3f} in the model's own, forward and backward"
    )


def parts(measured: Sequence[Measurement]) -> str:
    """Return a table of milliseconds per phase on rank 0, and of what the phases contain."""
    cells = []
    for each in measured:
        if not each.phases:
            continue
        first = each.phases[0]
        parts = [first.get(part, 0.0) for part in PARTS]
        within = [first.get(part, 0.0) for part in WITHIN]
        values = [*parts, first["step"] - sum(parts), first["step"], *within]
        cells.append((each.spec.name, *(f"{1e3 * value:.1f}" for value in values)))
    headings = (
        "ms of a step",
        *PARTS,
        "rest",
        "whole",
        *(f"({part})" for part in WITHIN),
    )
    return table(cells, headings, "l" + "r" * (len(headings) - 1))


def profile_tables(measured: Sequence[Measurement]) -> str:
    """Return tables of the slowest operations, and the names of attention's."""
    found = []
    for each in measured:
        if each.profile:
            found.append(f"\n{each.spec.name}: operations of a step, by their own time")
            cells = [
                (f"{1e3 * s:.1f}", f"{count:g}", name)
                for name, s, count in each.profile["top"]
            ]
            found.append(table(cells, ("ms", "calls", "operation"), "rrl"))
            found.append(
                f"attention: {', '.join(each.profile['attention']) or 'no kernel of that name'}"
            )
    return "\n".join(found)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def draw(rows: Sequence[SpeedRow], out: Path, title: str) -> None:
    """Draw a bar of tokens per second for each system, labelled with its share of the matrix rate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh([row.name for row in rows], [row.tokens_per_s for row in rows])
    axes.bar_label(
        bars,
        [f" {row.seconds:.3g} s, {percent(row.share)}" for row in rows],
        fontsize=8,
    )
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("tokens per second (seconds per step, share of the matrix rate)")
    axes.set_title(title, fontsize=9)
    figure.savefig(out, dpi=120)


def starts(measured: Sequence[Measurement]) -> str:
    """Return a table of seconds from start to readiness, and of the first steps."""
    cells = []
    for each in measured:
        if each.start_s is not None and each.warm_up_s is not None and each.seconds:
            said = "; ".join([*each.said, *graphs(each)])
            cells.append(
                (each.spec.name, f"{each.start_s:.1f}", f"{each.warm_up_s:.1f}", said)
            )
    return table(cells, ("s until", "built", "warm", "said"), "lrrl")


def graphs(measured: Measurement) -> list[str]:
    """Return the number of torch.compile's graphs, and the reasons of its graph breaks."""
    found = measured.graphs
    return (
        [] if found is None else [counted(found["graphs"], "graph"), *found["breaks"]]
    )
