"""What a row owes itself, layout and batch, and rows of a table each other: scaling, times, repetitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from launch.tables.verifying.printed_values import derived
from launch.tables.verifying.rows import TIME, Check, Row


def layout(row: Row) -> Iterator[Check]:
    """tp x pp x dp = GPUs; micro x accumulation x dp = global; pp divides the layers, tp the heads."""
    tp, pp, dp = (row.as_printed(f"parallel.{degree}") for degree in ("tp", "pp", "dp"))
    yield _product(row, "GPUs", row.as_printed("hardware.gpus"), tp, pp, dp)
    micro, accumulation = row.as_printed("batch.micro"), row.as_printed("batch.accumulation") or 1
    yield _product(row, "global batch", row.as_printed("batch.global"), micro, accumulation, dp)
    batch, model, (own_tp, own_pp) = row.recipe.batch, row.recipe.model, row.recipe.parallel.model_parallel
    if row.published.printed:
        factors = (batch.micro, batch.accumulation or 1, row.recipe.parallel.dp)
        yield _product(row, "global batch of the run", batch.global_, *factors)
    shares = ("layers per stage", model.layers, own_pp), ("heads per rank", model.heads, own_tp)
    for quantity, whole, by in shares:
        yield row.compare(quantity, f"{whole} over {by}", f"{whole / by:g}", whole % by == 0)


def _product(row: Row, quantity: str, printed: int | None, *factors: int | None) -> Check:
    known = [factor for factor in factors if factor is not None]
    computed = f"{' x '.join(map(str, known))} = {math.prod(known)}"
    if printed is None or len(known) < len(factors):
        why = "the row has no such number" if printed is None else "the recipe leaves a factor open"
        return row.unchecked(quantity, why, printed or "", "" if printed else computed)
    return row.compare(quantity, printed, computed, math.prod(known) == printed)


def checks(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    """`rows`: all of the table."""
    if row.published.weak_scaling_percent is not None:
        yield _weak_scaling(row, rows)
    yield from _slower_with_less(row, rows)


def _weak_scaling(row: Row, rows: Sequence[Row]) -> Check:
    """TFLOPS per GPU relative to the baseline's: the work per GPU is the same."""
    printed, tflops = row.printed("published.weak_scaling_percent"), row.printed("published.tflops")
    baselines = (other for other in rows if other.published.weak_scaling_percent == 100)
    base = next((other.printed("published.tflops") for other in baselines), None)
    assert printed
    if tflops is None or base is None:
        why = "needs the TFLOPS of the row and of a baseline"
        return row.unchecked("weak scaling", why, printed.text)
    computed, how = derived(printed, "the printed TFLOPS", lambda t, b: 100 * t / b, tflops, base)
    ratio = f"{tflops.text} / {base.text} = {computed:.1f} %"
    said = f"{computed:g} %" if row.published.weak_scaling_percent == 100 else ratio
    return row.compare("weak scaling", printed.text, said, how)


def _slower_with_less(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    """Nothing but the micro-batch differs, it is smaller, and still the iteration took longer."""
    own = row.published.time_per_iteration_s
    larger = [other for other in alike(row, rows) if other.micro > row.micro]
    timed = [(other.published.time_per_iteration_s, other) for other in larger]
    quicker = [(seconds, other) for seconds, other in timed if own and seconds and seconds < own]
    if quicker:
        seconds, other = max(quicker, key=lambda pair: pair[0])
        least = f"at most {seconds:g} s, as {other.name} took for micro-batch {other.recipe.batch.micro}"
        yield row.compare("time", row.cell_of(TIME.name) or str(own), least, None)


def alike(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The other rows that differ in the micro-batch at most."""
    same = _configuration(row, but_micro=True)
    return [other for other in rows if other is not row and _configuration(other, but_micro=True) == same]


def repeated(rows: Sequence[Row]) -> list[str]:
    """Remarks on configurations that are printed with more than one time."""
    timed = [row for row in rows if row.published.time_per_iteration_s]
    remarks = []
    for _, group in groupby(sorted(timed, key=lambda row: repr(_configuration(row))), key=_configuration):
        same = list(group)
        if len(same) > 1:
            times = [row.published.time_per_iteration_s or 0 for row in same]
            apart = f"{100 * (max(times) / min(times) - 1):.0f} % apart, for one configuration"
            names = ", ".join(row.full_name for row in same)
            remarks.append(f"{' / '.join(f'{time:g}' for time in times)} s, {apart}: {names}")
    return remarks


def _configuration(row: Row, but_micro: bool = False) -> tuple[Any, ...]:
    """What decides a speed, perhaps but for the micro-batch."""
    recipe, batch = row.recipe, row.recipe.batch
    shared = (batch.accumulation,) if but_micro else (batch.micro, batch.accumulation, batch.global_)
    return (
        recipe.model, recipe.sequence_length, recipe.parallel, shared, recipe.activation_checkpointing,
        recipe.ds_config, row.own("hardware.name"), row.as_printed("hardware.gpus"), row.published.framework,
    )  # fmt: skip
