"""Identities of a row's layout and batch, on the values as printed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from launch.tables.verifying.check import Check
from launch.tables.verifying.rows import Row


def checks(row: Row) -> Iterator[Check]:
    """tp x pp x dp = GPUs; micro x accumulation x dp = global; pp divides the layers, tp the heads."""
    tp, pp, dp = (row.as_printed(f"parallel.{degree}") for degree in ("tp", "pp", "dp"))
    gpus = row.as_printed("hardware.gpus")
    if gpus is None:
        yield row.say(
            "not checkable", "GPUs", f"{tp} x {pp} x {dp} = {tp * pp * dp}", "the row has no number of GPUs"
        )
    else:
        yield _product(row, "GPUs", gpus, tp, pp, dp)
    micro, accumulation = row.as_printed("batch.micro"), row.as_printed("batch.accumulation") or 1
    yield _product(row, "global batch", row.as_printed("batch.global"), micro, accumulation, dp)
    if row.published.printed:
        batch, own_dp = row.recipe.batch, row.recipe.parallel.dp
        yield _product(
            row, "global batch of the run", batch.global_, batch.micro, batch.accumulation or 1, own_dp
        )
    yield _divides(row, "layers per stage", row.recipe.model.layers, row.recipe.parallel.model_parallel[1])
    yield _divides(row, "heads per rank", row.recipe.model.heads, row.recipe.parallel.model_parallel[0])


def _product(row: Row, quantity: str, printed: int, *factors: int | None) -> Check:
    if None in factors:
        return row.say("not checkable", quantity, "", "the recipe leaves a factor open", str(printed))
    result = math.prod(factor for factor in factors if factor is not None)
    return row.compare(
        quantity,
        str(printed),
        f"{' x '.join(map(str, factors))} = {result}",
        "exact" if result == printed else None,
    )


def _divides(row: Row, quantity: str, number: int, by: int) -> Check:
    return row.compare(quantity, f"{number} over {by}", f"{number / by:g}", None if number % by else "exact")
