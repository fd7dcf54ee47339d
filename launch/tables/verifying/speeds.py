"""Throughput of a row: samples/s, TFLOPS by the documents' formula and by an exact count, shares of the peak."""

from __future__ import annotations

from collections.abc import Iterator

from ds_configs.sections.transformers_modules import embedding_rows
from launch.tables.verifying.check import Check
from launch.tables.verifying.printed_values import Printed, agreement, label_unit, spread
from launch.tables.verifying.rows import Row
from modeling import cost

TIME = "published.time_per_iteration_s"
PEAKS = {
    "V100": 125.0
}  # TFLOPS in half precision where the row's document states none: as the Jean Zay document has it
LEAST, MOST = (
    1.0,
    70.0,
)  # % of the peak: the slowest row has 3 (a pipeline of 64 stages and 4 micro-batches), the quickest 52
NEAR_TWICE = 0.005  # relative: a value this close to twice the computed one is called twice


def checks(row: Row, once: int) -> Iterator[Check]:
    """`once`: parameters of the model, each counted once."""
    published = row.published
    if published.oom:
        yield row.say(
            "not checkable", "time", how="out of memory: no time, no samples/s, no TFLOPS", printed="OOM"
        )
        return
    if published.time_per_iteration_s is None:
        printed = next((str(v) for v in (published.samples_per_s, published.tflops) if v is not None), "")
        yield row.say("not checkable", "time", _implied(row), "no time of an iteration is printed", printed)
        if published.samples_per_s is not None:
            yield from _plausible(row, row.recipe.batch.global_ / published.samples_per_s)
    else:
        if published.samples_per_s is not None:
            yield _samples(row)
        if published.tflops is not None:
            yield _tflops(row)
        yield from _computed(row, once)
    if published.peak_percent is not None:
        yield _peak(row)


def _implied(row: Row) -> str:
    rate = row.published.samples_per_s
    return f"{row.recipe.batch.global_ / rate:.3f} s would give it" if rate else ""


def _samples(row: Row) -> Check:
    """Samples of an iteration over its time."""
    rate, seconds, batch = (
        row.printed("published.samples_per_s"),
        row.printed(TIME),
        row.as_printed("batch.global"),
    )
    assert rate and seconds
    computed = batch / seconds.value
    how = agreement(rate, computed, spread(lambda s: batch / s, seconds), "the printed time")
    return row.compare("samples/s", rate.text, f"{batch} / {seconds.value:g} s = {computed:.3f}", how)


def formula(row: Row, parameters: float, seconds: float) -> float:
    """TFLOPS per GPU by the documents' formula, with the batch and the GPUs as printed."""
    return cost.published_tflops(
        parameters, row.recipe.sequence_length, row.as_printed("batch.global"), seconds, row.as_printed("hardware.gpus"),
        checkpointing=row.recipe.checkpoint_interval > 0,
    )  # fmt: skip


def _tflops(row: Row) -> Check:
    """By the definition that the row states: the formula with the size as the label has it, whatever its unit, or every product."""
    printed, seconds, label = row.printed("published.tflops"), row.printed(TIME), row.published.size_label
    assert printed and seconds
    if row.published.tflops_by == "exact":
        work, gpus = operations(row), row.as_printed("hardware.gpus")
        limits = spread(lambda s: cost.exact_tflops(work, s, gpus), seconds)
        exact = cost.exact_tflops(work, seconds.value, gpus)
        return row.compare(
            "TFLOPS",
            printed.text,
            f"{exact:.4g}, every product",
            agreement(printed, exact, limits, "the printed time"),
        )
    if label is None:
        return row.say(
            "not checkable",
            "TFLOPS",
            how="the row prints no model size for the formula",
            printed=printed.text,
        )
    size = _size(row, label)
    computed = formula(row, size, seconds.value)
    how = agreement(printed, computed, spread(lambda s: formula(row, size, s), seconds), "the printed time")
    ratio = printed.value / computed
    off = (
        "printed is twice that"
        if abs(ratio / 2 - 1) < NEAR_TWICE
        else f"printed is {100 * (ratio - 1):+.1f} %"
    )
    return row.compare(
        "TFLOPS", printed.text, f"{computed:.4g} with {label}" + ("" if how else f" ({off})"), how
    )


def _size(row: Row, label: str) -> float:
    """Parameters that a size label says."""
    size = Printed.read(label, label_unit(label))
    assert size is not None, f"{row.full_name}: size label {label!r} has no number"
    return size.value


def _computed(row: Row, once: int) -> Iterator[Check]:
    """For information: what the printed time means in operations."""
    seconds, gpus = row.published.time_per_iteration_s, row.as_printed("hardware.gpus")
    recipe = row.recipe
    if gpus is None:
        return
    if recipe.published and recipe.published.tflops is None and recipe.published.size_label:
        label = recipe.published.size_label
        size = _size(row, label)
        yield row.say(
            "computed",
            "TFLOPS, formula, label",
            f"{formula(row, size, seconds):.4g}",
            f"none is printed; {label} as the size",
        )
        declared = recipe.published.printed.get("batch.global")
        if declared is not None:
            own = formula(row, size, seconds) * recipe.batch.global_ / float(declared)
            yield row.say(
                "computed",
                "TFLOPS, formula, batch of the run",
                f"{own:.4g}",
                f"global batch {recipe.batch.global_}",
            )
    if row.unknown("model"):
        return
    share = recipe.batch.global_ / row.as_printed("batch.global")
    yield row.say(
        "computed",
        "TFLOPS, formula, all parameters",
        f"{share * formula(row, once, seconds):.4g}",
        f"{once} parameters",
    )
    work = operations(row)
    exact = cost.exact_tflops(work, seconds, gpus)
    yield row.say(
        "computed",
        "TFLOPS, exact count",
        f"{exact:.4g}",
        f"{work:.4g} operations per iteration on {gpus} GPUs",
    )
    yield from _plausible(row, seconds)


def operations(row: Row) -> int:
    """Of one iteration, every matrix product counted."""
    recipe = row.recipe
    return cost.exact_flops_per_step(
        recipe.model, recipe.sequence_length, recipe.batch.global_, padded_vocab=embedding_rows(recipe, recipe.parallel.model_parallel[0]),
        checkpointing=recipe.checkpoint_interval > 0, predictions=recipe.predictions,
    )  # fmt: skip


def _plausible(row: Row, seconds: float) -> Iterator[Check]:
    """A time within what a GPU can do, and not two orders of magnitude below what rows reach: bounds, which catch a wrong unit or digit."""
    name, gpus = str(row.own("hardware.name")), row.as_printed("hardware.gpus")
    peak = row.own("hardware.peak_tflops") or next(
        (value for gpu, value in PEAKS.items() if gpu in name), None
    )
    if peak and gpus:
        share = 100 * cost.exact_tflops(operations(row), seconds, gpus) / peak
        how = "plausible" if LEAST <= share <= MOST else None
        yield row.compare(
            "share of peak, exact count", f"{LEAST:g} to {MOST:g} %", f"{share:.1f} % of {peak:g} TFLOPS", how
        )


def _peak(row: Row) -> Check:
    printed, tflops, peak = (
        row.printed("published.peak_percent"),
        row.printed("published.tflops"),
        row.own("hardware.peak_tflops"),
    )
    assert printed
    if tflops is None or peak is None:
        return row.say("not checkable", "share of peak", how="needs TFLOPS and a peak", printed=printed.text)
    computed = 100 * tflops.value / peak
    how = agreement(printed, computed, spread(lambda t: 100 * t / peak, tflops), "the printed TFLOPS")
    return row.compare("share of peak", printed.text, f"{tflops.text} / {peak:g} = {computed:.2f} %", how)
