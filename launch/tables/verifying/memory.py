"""Memory of rows: what ran fits, what ran out does not, and cached memory is between both bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_configs.jsonfile import ConfigError
from launch.planning.memory_fit import needs
from launch.planning.resolved_plans import published_plan
from launch.tables.verifying.relations import alike
from launch.tables.verifying.rows import Check, Row


def checks(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    """`rows`: all of the table."""
    memory = row.own("hardware.gpu_memory_gb")
    quantity = "out of memory" if row.published.oom else "model states"
    ran = "OOM" if row.published.oom else f"ran on {memory or 0:g} GB"
    try:
        states = states_gb(row)
    except ConfigError as error:
        yield row.unchecked(quantity, f"its layout cannot be run here: {error}", ran)
        return
    if row.published.oom:
        yield _out_of_memory(row, rows, states, memory)
    elif memory is None:
        yield row.unchecked(quantity, "no memory of its GPUs is known", computed=f"{states:.1f} GB")
    else:
        yield row.compare(quantity, ran, f"{states:.1f} GB", "they fit" if states <= memory else None)
    if row.published.cached_gb is not None:
        yield _cached(row, row.published.cached_gb, states, memory)
        yield from _less_with_more(row, row.published.cached_gb, rows)


def states_gb(row: Row) -> float:
    """Model states on the fullest GPU while it steps, in GB (10^9). Raises ConfigError."""
    return needs(published_plan(row.recipe)).states / 1e9


def _out_of_memory(row: Row, rows: Sequence[Row], states: float, memory: float | None) -> Check:
    """Contradicted by a larger batch that ran; confirmed where the model states alone exceed the memory."""
    ran = [r for r in alike(row, rows) if not r.published.oom and r.micro >= row.micro]
    if ran:
        return row.compare("out of memory", "OOM", f"micro-batch {ran[0].micro} of the same model ran", None)
    if memory and states > memory:
        computed = f"{states:.1f} GB of model states on {memory:g} GB"
        return row.compare("out of memory", "OOM", computed, "they do not fit")
    why = "the model states fit: activations decide, which nothing printed gives"
    return row.unchecked("out of memory", why, "OOM")


def _cached(row: Row, cached: float, states: float, memory: float | None) -> Check:
    """At least weights, gradients and Adam's states, at most the GPU: activations are unknown."""
    held = states <= cached <= (memory or cached)
    limits = f"{states:.1f} GB of model states" + (f" to {memory:g} GB" if memory else "")
    printed = row.cell_of("published.cached_gb") or str(cached)
    return row.compare("cached", printed, limits, "between them: bounds, no value" if held else None)


def _less_with_more(row: Row, own: float, rows: Sequence[Row]) -> Iterator[Check]:
    """Nothing but the micro-batch differs, it is smaller, and still more memory was cached."""
    larger = [other for other in alike(row, rows) if other.micro > row.micro]
    if known := [(r.published.cached_gb, r) for r in larger if r.published.cached_gb]:
        least, other = min(known, key=lambda pair: pair[0])
        computed = f"at most {least:g} GB, as {other.name} had for micro-batch {other.recipe.batch.micro}"
        how = "no more than a larger batch" if own <= least else None
        yield row.compare("cached, over micro-batches", f"{own:g}", computed, how)
