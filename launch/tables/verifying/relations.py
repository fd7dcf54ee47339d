"""What rows of one table owe each other: weak scaling, times, repeated measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from launch.tables.verifying.check import Check
from launch.tables.verifying.printed_values import agreement, spread
from launch.tables.verifying.rows import Row


def checks(rows: Sequence[Row]) -> Iterator[Check]:
    """`rows` of one table."""
    for row in rows:
        if row.published.weak_scaling_percent is not None:
            yield _weak_scaling(row, rows)
        if not row.published.oom:
            yield from _slower_with_less(row, rows)


def _weak_scaling(row: Row, rows: Sequence[Row]) -> Check:
    """TFLOPS per GPU relative to the baseline's: the work per GPU is the same."""
    printed, tflops = row.printed("published.weak_scaling_percent"), row.printed("published.tflops")
    base = next(
        (other.printed("published.tflops") for other in rows if other.published.weak_scaling_percent == 100),
        None,
    )
    assert printed
    if tflops is None or base is None:
        return row.say(
            "not checkable",
            "weak scaling",
            how="needs the TFLOPS of the row and of a baseline",
            printed=printed.text,
        )
    computed = 100 * tflops.value / base.value
    if row.published.weak_scaling_percent == 100:
        return row.compare("weak scaling", printed.text, f"{computed:g} %", agreement(printed, computed))
    how = agreement(printed, computed, spread(lambda t, b: 100 * t / b, tflops, base), "the printed TFLOPS")
    return row.compare("weak scaling", printed.text, f"{tflops.text} / {base.text} = {computed:.1f} %", how)


def _slower_with_less(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    """Nothing but the micro-batch differs, it is smaller, and still the iteration took longer."""
    own, micro = row.published.time_per_iteration_s, row.recipe.batch.micro
    larger = [r for r in rows if own and same(r, row, "micro") and r.recipe.batch.micro > micro]
    quicker = [r for r in larger if (r.published.time_per_iteration_s or own) < own]
    if quicker:
        other = max(quicker, key=lambda r: r.published.time_per_iteration_s)
        least = f"at most {other.published.time_per_iteration_s:g} s, as {other.name} took for micro-batch {other.recipe.batch.micro}"
        yield row.compare("time", row.cell_of("published.time_per_iteration_s") or str(own), least, None)


def repeated(rows: Sequence[Row]) -> list[str]:
    """Remarks on configurations that are printed with more than one time."""
    timed = sorted(
        (row for row in rows if row.published.time_per_iteration_s), key=lambda row: repr(_configuration(row))
    )
    remarks = []
    for _, group in groupby(timed, key=_configuration):
        same = list(group)
        times = [row.published.time_per_iteration_s for row in same]
        if len(same) > 1:
            names, apart = ", ".join(row.full_name for row in same), 100 * (max(times) / min(times) - 1)
            remarks.append(
                f"{' / '.join(f'{time:g}' for time in times)} s, {apart:.0f} % apart, for one configuration: {names}"
            )
    return remarks


def same(one: Row, other: Row, but: str) -> bool:
    """Two rows of one configuration, `but` "micro" for its micro-batch."""
    return one is not other and _configuration(one, but) == _configuration(other, but)


def _configuration(row: Row, but: str = "") -> tuple[Any, ...]:
    """What decides a speed, the micro-batch left out where `but` is "micro"."""
    recipe = row.recipe
    batch = (
        (recipe.batch.accumulation,)
        if but == "micro"
        else (recipe.batch.micro, recipe.batch.accumulation, recipe.batch.global_)
    )
    return (
        recipe.model, recipe.sequence_length, recipe.parallel, batch, recipe.activation_checkpointing, recipe.ds_config,
        row.own("hardware.name"), row.as_printed("hardware.gpus"), row.published.framework,
    )  # fmt: skip
