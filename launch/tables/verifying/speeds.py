"""Throughput of a row: samples/s, TFLOPS by the documents' formula and by exact count, shares of the peak."""

from __future__ import annotations

from collections.abc import Iterator

from ds_configs.sections.transformers_modules import embedding_rows
from launch.tables.verifying.evidence import Evidence, OtherRun
from launch.tables.verifying.printed_values import Printed, derived, label_unit
from launch.tables.verifying.rows import SAMPLES, TIME, Check, Row
from modeling import cost

PEAKS = {"V100": 125.0}  # TFLOPS in half precision where a document states none: as Jean Zay's has it
LEAST, MOST = 1.0, 70.0  # % of the peak: the slowest row has 3 (64 stages, 4 micro-batches), the quickest 52
NEAR_TWICE = 0.005  # relative: a value this close to twice the computed one is called twice


def checks(row: Row, once: int, evidence: Evidence) -> Iterator[Check]:
    """`once`: parameters of the model, each counted once."""
    published = row.published
    seconds, rate, tflops = published.time_per_iteration_s, published.samples_per_s, published.tflops
    if published.oom:
        yield row.unchecked("time", "out of memory: no time, no samples/s, no TFLOPS", "OOM")
        return
    if seconds is not None:
        if rate is not None:
            yield _samples(row)
        if tflops is not None:
            yield _tflops(row)
        yield from _computed(row, once, seconds)
    else:
        implied = row.recipe.batch.global_ / rate if rate else None
        why, computed = "no time of an iteration is printed", implied and f"{implied:.3f} s would give it"
        yield row.unchecked("time", why, rate or tflops or "", computed or "")
        if implied:
            yield from _plausible(row, implied)
    if published.peak_percent is not None:
        yield _peak(row)
    for speeds in evidence.speeds:
        for run in speeds.rows.get(row.name, ()):
            yield _other_run(row, run, speeds.source)


def _samples(row: Row) -> Check:
    """Samples of an iteration over its time."""
    rate, seconds, batch = row.printed(SAMPLES.name), row.printed(TIME.name), row.as_printed("batch.global")
    assert rate and seconds
    computed, how = derived(rate, "the printed time", lambda s: batch / s, seconds)
    return row.compare("samples/s", rate.text, f"{batch} / {seconds.value:g} s = {computed:.3f}", how)


def formula(row: Row, parameters: float, seconds: float) -> float:
    """TFLOPS per GPU by the documents' formula, with the batch and the GPUs as printed."""
    recipe, printed = row.recipe, row.as_printed
    return cost.published_tflops(
        parameters, recipe.sequence_length, printed("batch.global"), seconds, printed("hardware.gpus"),
        checkpointing=recipe.checkpoint_interval > 0,
    )  # fmt: skip


def _tflops(row: Row) -> Check:
    """By the row's definition: every product, or the formula with the label's size, whatever its unit."""
    printed, seconds = row.printed("published.tflops"), row.printed(TIME.name)
    label = row.published.size_label
    assert printed and seconds
    if row.published.tflops_by == "exact":
        work, gpus = operations(row), row.as_printed("hardware.gpus")
        exact, how = derived(printed, "the printed time", lambda s: cost.exact_tflops(work, s, gpus), seconds)
        return row.compare("TFLOPS", printed.text, f"{exact:.4g}, every product", how)
    if label is None:
        return row.unchecked("TFLOPS", "the row prints no model size for the formula", printed.text)
    size = _size(row, label)
    computed, how = derived(printed, "the printed time", lambda s: formula(row, size, s), seconds)
    ratio = printed.value / computed
    twice = abs(ratio / 2 - 1) < NEAR_TWICE
    off = "" if how else " (printed is twice that)" if twice else f" (printed is {100 * (ratio - 1):+.1f} %)"
    return row.compare("TFLOPS", printed.text, f"{computed:.4g} with {label}{off}", how)


def _size(row: Row, label: str) -> float:
    """Parameters that a size label says."""
    size = Printed.read(label, label_unit(label))
    assert size is not None, f"{row.full_name}: size label {label!r} has no number"
    return size.value


def _computed(row: Row, once: int, seconds: float) -> Iterator[Check]:
    """For information: what the printed time means in operations."""
    gpus, label, batch = row.as_printed("hardware.gpus"), row.published.size_label, row.recipe.batch.global_
    if gpus is None:
        return
    share = batch / row.as_printed("batch.global")

    def say(name: str, value: float, how: str) -> Check:
        return row.say("computed", f"TFLOPS, {name}", "", f"{value:.4g}", how)

    if row.published.tflops is None and label:
        by_label = formula(row, _size(row, label), seconds)
        yield say("formula, label", by_label, f"none is printed; {label} as the size")
        if "batch.global" in row.published.printed:
            yield say("formula, batch of the run", share * by_label, f"global batch {batch}")
    if row.unknown("model"):
        return
    yield say("formula, all parameters", share * formula(row, once, seconds), f"{once} parameters")
    work = operations(row)
    exact = cost.exact_tflops(work, seconds, gpus)
    yield say("exact count", exact, f"{work:.4g} operations per iteration on {gpus} GPUs")
    yield from _plausible(row, seconds)


def operations(row: Row) -> int:
    """Operations of one iteration, every matrix product counted."""
    recipe = row.recipe
    return cost.exact_flops_per_step(
        recipe.model, recipe.sequence_length, recipe.batch.global_,
        padded_vocab=embedding_rows(recipe, row.tp), checkpointing=recipe.checkpoint_interval > 0,
        predictions=recipe.predictions,
    )  # fmt: skip


def _plausible(row: Row, seconds: float) -> Iterator[Check]:
    """Whether a time is within what GPUs do and not far below what rows reach: catches a wrong digit."""
    name, gpus = str(row.own("hardware.name")), row.as_printed("hardware.gpus")
    known = (value for gpu, value in PEAKS.items() if gpu in name)
    peak = row.own("hardware.peak_tflops") or next(known, None)
    if peak and gpus:
        share = 100 * cost.exact_tflops(operations(row), seconds, gpus) / peak
        limits, computed = f"{LEAST:g} to {MOST:g} %", f"{share:.1f} % of {peak:g} TFLOPS"
        how = "plausible" if LEAST <= share <= MOST else None
        yield row.compare("share of peak, exact count", limits, computed, how)


def _peak(row: Row) -> Check:
    printed, tflops = row.printed("published.peak_percent"), row.printed("published.tflops")
    peak = row.own("hardware.peak_tflops")
    assert printed
    if tflops is None or peak is None:
        return row.unchecked("share of peak", "needs TFLOPS and a peak", printed.text)
    computed, how = derived(printed, "the printed TFLOPS", lambda t: 100 * t / peak, tflops)
    return row.compare("share of peak", printed.text, f"{tflops.text} / {peak:g} = {computed:.2f} %", how)


def _other_run(row: Row, run: OtherRun, source: str) -> Check:
    """TFLOPS that another document prints of the row's model, every product counted and layers recomputed."""
    printed, recipe, time = Printed.read(run.tflops), row.recipe, f"{run.milliseconds:g}"
    seconds = Printed.read(time, 1e-3)
    assert printed and seconds, f"{row.full_name}: {run} of its evidence"
    model, length, padded = recipe.model, recipe.sequence_length, embedding_rows(recipe, row.tp)
    work = cost.exact_flops_per_step(model, length, run.batch, padded_vocab=padded, checkpointing=True)
    exact, how = derived(printed, "the printed time", lambda s: cost.exact_tflops(work, s, run.gpus), seconds)
    quantity = f"TFLOPS, batch {run.batch} in {time} ms on {run.gpus} GPUs"
    return row.compare(quantity, run.tflops, f"{exact:.4g}", f"{how}: {source}" if how else None)
