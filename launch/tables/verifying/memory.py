"""Memory of rows: what ran fits, what ran out of memory does not, and printed cached memory lies between the model states and the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_configs.jsonfile import ConfigError
from launch.planning import memory_fit
from launch.tables.verifying.check import Check
from launch.tables.verifying.relations import same
from launch.tables.verifying.rows import Row

ACTIVATIONS = "the model states fit: activations decide, which nothing printed gives"


def checks(rows: Sequence[Row]) -> Iterator[Check]:
    """`rows` of one table."""
    for row in rows:
        memory = row.own("hardware.gpu_memory_gb")
        if row.published.oom:
            yield _out_of_memory(row, rows, memory)
            continue
        try:
            states = states_gb(row)
        except ConfigError as error:
            yield row.say("not checkable", "model states", how=f"its layout cannot be run here: {error}")
            continue
        if memory is None:
            yield row.say(
                "not checkable", "model states", f"{states:.1f} GB", "no memory of its GPUs is known"
            )
        else:
            yield row.compare(
                "model states",
                f"ran on {memory:g} GB",
                f"{states:.1f} GB",
                "they fit" if states <= memory else None,
            )
        if row.published.cached_gb is not None:
            yield _cached(row, states, memory)
            yield from _less_with_more(row, rows)


def states_gb(row: Row) -> float:
    """GB (10^9) of model states on the fullest GPU while it steps, by the recipe's ds_config and layout. Raises ConfigError."""
    return memory_fit.state_bytes(memory_fit.published_plan(row.recipe)).gpu / 1e9


def _cached(row: Row, states: float, memory: float | None) -> Check:
    """Weights, gradients and Adam's states are in it, and it is in the GPU: bounds, since activations are not known."""
    cell, cached = row.cell_of("published.cached_gb") or "", row.published.cached_gb
    held = states <= cached <= (memory or cached)
    limits = f"{states:.1f} GB of model states" + (f" to {memory:g} GB" if memory else "")
    return row.compare(
        "cached", cell or str(cached), limits, "between them: bounds, no value" if held else None
    )


def _less_with_more(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    """Nothing but the micro-batch differs, it is smaller, and still more memory was cached."""
    larger = [
        r
        for r in rows
        if same(r, row, "micro") and r.recipe.batch.micro > row.recipe.batch.micro and r.published.cached_gb
    ]
    if larger:
        least = min(larger, key=lambda r: r.published.cached_gb)
        own, other = row.published.cached_gb, least.published.cached_gb
        computed = f"at most {other:g} GB, as {least.name} had for micro-batch {least.recipe.batch.micro}"
        yield row.compare(
            "cached, over micro-batches",
            f"{own:g}",
            computed,
            "no more than a larger batch" if own <= other else None,
        )


def _out_of_memory(row: Row, rows: Sequence[Row], memory: float | None) -> Check:
    """Contradicted by a larger batch that ran; confirmed where the model states alone exceed the memory."""
    ran = [
        r
        for r in rows
        if not r.published.oom and same(r, row, "micro") and r.recipe.batch.micro >= row.recipe.batch.micro
    ]
    if ran:
        return row.compare(
            "out of memory", "OOM", f"micro-batch {ran[0].recipe.batch.micro} of the same model ran", None
        )
    try:
        states = states_gb(row)
    except ConfigError as error:
        return row.say(
            "not checkable", "out of memory", how=f"its layout cannot be run here: {error}", printed="OOM"
        )
    if memory and states > memory:
        return row.compare(
            "out of memory", "OOM", f"{states:.1f} GB of model states on {memory:g} GB", "they do not fit"
        )
    return row.say("not checkable", "out of memory", how=ACTIVATIONS, printed="OOM")
