"""Identities of a row's layout and batch, on the values as printed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from launch.tables.verifying.check import Check
from launch.tables.verifying.rows import Row


def checks(row: Row) -> Iterator[Check]:
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
