"""Recomputed quantities of a row: layout, sizes, speeds, scaling and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ds_configs.findings import ConfigError
from launch.planning.memory_fit import memory_of_plan
from launch.planning.resolved_plans import published_plan
from launch.tables.evidence import OtherRun, Part
from modeling import cost
from modeling.families import FAMILIES, model_shape
from recipes.schema import Recipe
from tools.tables import counting
from tools.tables.counting import RankCounts
from tools.tables.lines import SAMPLES, TFLOPS, TIME, CheckedRow, Checks, LineCheck
from tools.tables.printed import Printed, agreement, recompute, size_unit

SCALING = "published.weak_scaling_percent"
GPUS = "hardware.gpus", "parallel.tp", "parallel.pp", "parallel.dp"
BATCH = "batch.global", "batch.micro", "batch.accumulation", "parallel.dp"
DEGREES = (1, 2, 4, 8, 16)  # tensor-parallel degrees whose count a wrong size may be
PARTS: dict[Part, Callable[[RankCounts], int]] = {
    "each once": lambda counts: counts.once,
    "all ranks": lambda counts: counts.all_ranks,
    "first stage": lambda counts: counts.held[0][0],
    "middle stages": lambda counts: counts.held[1][0],
    "last stage": lambda counts: counts.held[-1][0],
}
# TFLOPS in half precision where a document states none: as Jean Zay's has it
PEAK_OF_V100 = 125.0
IN_TIME = "the printed time"  # whose rounding may explain a difference
IN_TFLOPS = "the printed TFLOPS"
LEAST = 1.0  # % of the peak: the slowest row has 3 (64 stages, 4 micro-batches)
MOST = 70.0  # the quickest one has 52
# relative: a value this close to twice the computed one is called twice
NEAR_TWICE = 0.005


# --- layout


def layout(row: CheckedRow) -> Checks:
    """Check tp x pp x dp = GPUs, micro x accumulation x dp = global, and divisible layers and heads."""
    yield _product(row, "GPUs", row.printed_value, *GPUS)
    yield _product(row, "global batch", row.printed_value, *BATCH)
    if row.published.printed:
        yield _product(row, "global batch of the run", row.value, *BATCH)
    model, (tp, pp) = row.recipe.model, row.recipe.parallel.model_parallel
    for quantity, whole, by in (
        ("layers per stage", model.layers, pp),
        ("heads per rank", model.heads, tp),
    ):
        share = f"{whole / by:g}"
        yield row.compare(quantity, f"{whole} over {by}", share, whole % by == 0)


def _product(
    row: CheckedRow, quantity: str, value: Callable[[str], Any], *keys: str
) -> LineCheck:
    """Check that the value of the first key is the product of the others."""
    printed, *factors = map(value, keys)
    if "batch.accumulation" in keys:
        factors[1] = factors[1] or 1
    # one that the recipe leaves open makes the product wrong
    product = math.prod(each or 0 for each in factors)
    return row.compare(
        quantity,
        printed,
        f"{' x '.join(map(str, factors))} = {product}",
        product == printed,
    )


# --- sizes


def counts(recipe: Recipe) -> RankCounts:
    """Count the parameters of one replica, tp x pp ranks, on its modules.

    Raises AssertionError where the ranks cannot share the model.
    """
    model, (tp, pp) = recipe.model, recipe.parallel.model_parallel
    if model.implementation == "transformers":
        return counting.count_transformers(model, recipe.positions)
    shape = model_shape(recipe, model.embedding_rows(tp))
    layers = cost.stages_of(recipe, shape.padded_vocab, pp)
    return counting.count(FAMILIES[model.family]().layer_list, shape, tp, layers)


def arithmetic(recipe: Recipe) -> RankCounts:
    """Count the same parameters by the formulas of modeling/cost/."""
    model, (tp, pp) = recipe.model, recipe.parallel.model_parallel
    positions = recipe.positions
    padded = model.embedding_rows(tp)
    layers = cost.stages_of(recipe, padded, pp)
    stages = []
    for stage, own in enumerate(layers):
        held = cost.parameters_per_rank(
            model,
            positions,
            padded,
            tp,
            layers=own,
            first=stage == 0,
            last=stage == pp - 1,
        )
        stages.append((held,) * tp)
    return RankCounts(tuple(stages), cost.parameters(model, positions), layers)


def _can_be_built(row: CheckedRow) -> bool:
    return row.recipe.model.heads % row.tp == 0


def sizes(row: CheckedRow) -> Checks:
    """Check the modules against the formulas at every rank, then printed sizes against the modules."""
    if not _can_be_built(row):
        why = "no module of this layout can be built: tp does not divide the heads"
        yield row.not_checkable("parameters", why)
        return
    counted = counts(row.recipe)
    published = row.published
    expected = arithmetic(row.recipe)
    same = counted == expected
    ours = f"{counted.once} on {sum(map(len, counted.held))} ranks"
    if not same:
        ours = _first_differences(counted, expected)
    yield row.compare("modules against cost.py", expected.once, ours, same)
    for quantity, printed, ranks in (
        ("parameters", published.parameters, 1),
        ("parameters per rank", published.parameters_per_rank, row.tp),
    ):
        if printed is not None:
            yield _to_the_unit(row, quantity, printed, counted, ranks)
    if published.size_label:
        yield _label(row, published.size_label, counted)
    elif published.parameters is None:
        why = "the row prints no model size"
        yield row.not_checkable("parameters", why, computed=counted.all_ranks)
    for document in row.source.evidence.sizes:
        for part, size in document.rows.get(row.name, {}).items():
            computed = PARTS[part](counted)
            how = agreement(_size(str(size)), computed)
            how = how and f"{how}: {document.source}"
            yield row.compare(f"parameters, {part}", size, computed, how)


def _first_differences(counted: RankCounts, expected: RankCounts) -> str:
    """Say which stages differ, rank by rank: this project's mistake, never a source's."""
    wrong = []
    for stage, (got, want) in enumerate(zip(counted.held, expected.held, strict=True)):
        if got != want:
            wrong.append(f"stage {stage}: {got} for {want}")
    once = f"once {counted.once}, layers {set(counted.layers)}"
    return "; ".join(wrong[:2]) or once


def _to_the_unit(
    row: CheckedRow, quantity: str, printed: int, counted: RankCounts, ranks: int
) -> LineCheck:
    """Compare with the parameters of all ranks, or of one; a wrong number may fit another layout."""
    computed = counted.all_ranks // ranks
    if printed == computed:
        return row.compare(quantity, printed, computed, how=True)
    hint = ""
    share = f" / {ranks}" if ranks > 1 else ""
    model = row.recipe.model
    for tp in reversed(DEGREES):
        held = cost.parameters_per_rank(
            model, row.recipe.positions, model.embedding_rows(tp), tp
        )
        if tp * held == printed * ranks:
            hint = f" (the printed one is the count at tp {tp}{share})"
    return row.compare(quantity, printed, f"{computed}{hint}", None)


def _label(row: CheckedRow, label: str, counted: RankCounts) -> LineCheck:
    """Compare in 10^9 or 10^6, every parameter once; name other units of these sources that fit."""
    unit = size_unit(label)
    size = _size(label)
    plain = f"{counted.once / unit:.4g}{label[-1:]}"
    reason = row.unknown_reason("model")
    if reason:
        return row.not_checkable(
            "size label", f"the model stands in: {reason}", label, plain
        )
    how = agreement(size, counted.once)
    if how in ("exact", "rounded"):
        return row.compare("size label", label, plain, how)
    for name, value in (
        ("in 2^30", counted.once / 2**30),
        ("of all ranks in 2^20 x 1000", counted.all_ranks / 2**20 / 1e3),
    ):
        if unit == 1e9 and agreement(size, value * unit) == "rounded":
            plain += f"; {value:.2f} {name}"
    return row.compare("size label", label, plain, None)


def _size(label: str) -> Printed:
    """Return the number of parameters of a size label."""
    size = Printed.read(label, size_unit(label))
    assert size is not None, f"size label {label!r} has no number"
    return size


# --- speeds


def missing_time(row: CheckedRow) -> Checks:
    """Report a missing time, and check that the time implied by samples/s is plausible."""
    published = row.published
    rate = published.samples_per_s
    if published.oom:
        why = "out of memory: no time, no samples/s, no TFLOPS"
        yield row.not_checkable("time", why, "OOM")
    elif published.time_per_iteration_s is None:
        why = "no time of an iteration is printed"
        implied = row.recipe.batch.global_ / rate if rate else None
        computed = f"{implied:.3f} s would give it" if implied else ""
        yield row.not_checkable("time", why, rate or published.tflops or "", computed)
        if implied:
            yield from _plausible(row, implied)


def formula(row: CheckedRow, parameters: float, seconds: float) -> float:
    """Return TFLOPS per GPU by the documents' formula, with batch and GPUs as printed."""
    return cost.published_tflops(
        parameters,
        row.recipe.sequence_length,
        row.batch,
        seconds,
        row.gpus,
        checkpointing=row.recipe.checkpoint_interval > 0,
    )


def operations(row: CheckedRow) -> int:
    """Count the operations of one iteration, every matrix product included."""
    recipe = row.recipe
    return cost.operations_of(
        recipe, recipe.batch.global_, recipe.model.embedding_rows(row.tp)
    )


def samples(row: CheckedRow) -> Checks:
    """Check samples/s: the batch over the printed time."""
    rate = row.printed_number(SAMPLES)
    seconds = row.printed_number(TIME)
    if rate and seconds:
        computed, how = recompute(rate, IN_TIME, lambda s: row.batch / s, seconds)
        yield row.compare(
            "samples/s",
            rate.text,
            f"{row.batch} / {seconds.value:g} s = {computed:.3f}",
            how,
        )


def tflops(row: CheckedRow) -> Checks:
    """Check TFLOPS by the row's definition: every product, or the formula with the label's size."""
    printed = row.printed_number(TFLOPS)
    seconds = row.printed_number(TIME)
    label = row.published.size_label
    if not (printed and seconds):
        return
    gpus = row.gpus
    if row.published.tflops_by == "exact":
        work = operations(row)
        exact, how = recompute(
            printed, IN_TIME, lambda s: cost.exact_tflops(work, s, gpus), seconds
        )
        yield row.compare("TFLOPS", printed.text, f"{exact:.4g}, every product", how)
        return
    size = _size(label or "").value
    computed, how = recompute(
        printed, IN_TIME, lambda s: formula(row, size, s), seconds
    )
    said = f"{computed:.4g} with {label}"
    ratio = printed.value / computed
    if not how and abs(ratio / 2 - 1) < NEAR_TWICE:
        said += " (printed is twice that)"
    elif not how:
        said += f" (printed is {100 * (ratio - 1):+.1f} %)"
    yield row.compare("TFLOPS", printed.text, said, how)


def operations_per_second(row: CheckedRow) -> Checks:
    """Report the printed time as TFLOPS, and check that their share of the peak is plausible."""
    seconds = row.published.time_per_iteration_s
    label = row.published.size_label
    gpus = row.gpus
    batch = row.recipe.batch.global_
    if gpus is None or seconds is None:
        return

    def information(name: str, value: float, how: str) -> LineCheck:
        return row.check("computed", f"TFLOPS, {name}", "", f"{value:.4g}", how)

    share = batch / row.batch
    if row.published.tflops is None and label:
        by_label = formula(row, _size(label).value, seconds)
        how = f"none is printed; {label} as the size"
        yield information("formula, label", by_label, how)
        if "batch.global" in row.published.printed:
            how = f"global batch {batch}"
            yield information("formula, batch of the run", share * by_label, how)
    if row.unknown_reason("model") or not _can_be_built(row):
        return
    once = counts(row.recipe).once
    work = operations(row)
    by_all = share * formula(row, once, seconds)
    yield information("formula, all parameters", by_all, f"{once} parameters")
    exact = cost.exact_tflops(work, seconds, gpus)
    how = f"{work:.4g} operations per iteration on {gpus} GPUs"
    yield information("exact count", exact, how)
    yield from _plausible(row, seconds)


def _plausible(row: CheckedRow, seconds: float) -> Checks:
    """Check a time's share of the GPU's peak within wide limits, to catch a wrong digit."""
    peak = _peak(row)
    if peak and row.gpus:
        share = 100 * cost.exact_tflops(operations(row), seconds, row.gpus) / peak
        limits = f"{LEAST:g} to {MOST:g} %"
        computed = f"{share:.1f} % of {peak:g} TFLOPS"
        how = "plausible" if LEAST <= share <= MOST else None
        yield row.compare("share of peak, exact count", limits, computed, how)


def _peak(row: CheckedRow) -> float | None:
    """Return the peak TFLOPS of the row's GPU in half precision, as printed or known."""
    known = PEAK_OF_V100 if "V100" in str(row.value("hardware.name")) else None
    return row.value("hardware.peak_tflops") or known


def share_of_peak(row: CheckedRow) -> Checks:
    """Check the printed share of the peak: printed TFLOPS over the GPU's peak."""
    printed = row.printed_number("published.peak_percent")
    rate = row.printed_number(TFLOPS)
    peak = row.value("hardware.peak_tflops")
    if printed:
        assert rate and peak, f"{row.full_name}: a share of the peak needs both"
        computed, how = recompute(printed, IN_TFLOPS, lambda t: 100 * t / peak, rate)
        yield row.compare(
            "share of peak",
            printed.text,
            f"{rate.text} / {peak:g} = {computed:.2f} %",
            how,
        )


def speedup(row: CheckedRow) -> Checks:
    """Check a printed speed-up over another row of the table: the ratio of the GPUs' peaks."""
    printed = row.printed_number("published.speedup")
    over = row.published.speedup_over
    slower = next((each for each in row.source.rows if each.full_name == over), None)
    own = _peak(row)
    least = slower and _peak(slower)
    if printed:
        assert slower and own and least, f"{row.full_name}: {over} and both peaks"
        yield row.compare(
            f"speed over {slower.name}",
            printed.text,
            f"{own:g} / {least:g} TFLOPS = {own / least:.3f}, of the peaks",
            agreement(printed, own / least),
        )


def speeds_of_other_runs(row: CheckedRow) -> Checks:
    """Check TFLOPS of the row's model in other documents."""
    for document in row.source.evidence.speeds:
        for run in document.rows.get(row.name, ()):
            yield _other_run(row, run, document.source)


def _other_run(row: CheckedRow, run: OtherRun, source: str) -> LineCheck:
    """Check a run by every product, with layers recomputed."""
    printed = Printed.read(run.tflops)
    time = f"{run.milliseconds:g}"
    seconds = Printed.read(time, 1e-3)
    assert printed and seconds, f"{row.full_name}: {run} of its evidence"
    work = cost.exact_flops_per_step(
        row.recipe.model,
        row.recipe.sequence_length,
        run.batch,
        padded_vocab=row.recipe.model.embedding_rows(row.tp),
        checkpointing=True,
    )
    exact, how = recompute(
        printed, IN_TIME, lambda s: cost.exact_tflops(work, s, run.gpus), seconds
    )
    return row.compare(
        f"TFLOPS, batch {run.batch} in {time} ms on {run.gpus} GPUs",
        run.tflops,
        f"{exact:.4g}",
        how and f"{how}: {source}",
    )


# --- rows of a table to each other


def scaling(row: CheckedRow) -> Checks:
    """Check TFLOPS per GPU relative to the baseline's: the work per GPU is the same."""
    printed = row.printed_number(SCALING)
    rate = row.printed_number(TFLOPS)
    whole = [r for r in row.source.rows if r.published.weak_scaling_percent == 100]
    of_base = whole[0].printed_number(TFLOPS) if whole else None
    if printed:
        assert rate and of_base, f"{row.full_name}: a row of 100 %, TFLOPS of both"
        computed, how = recompute(
            printed, IN_TFLOPS, lambda t, b: 100 * t / b, rate, of_base
        )
        said = f"{rate.text} / {of_base.text} = {computed:.1f} %"
        if row.published.weak_scaling_percent == 100:
            said = f"{computed:g} %"
        yield row.compare("weak scaling", printed.text, said, how)


def time_over_micro_batches(row: CheckedRow) -> Checks:
    """Report an iteration slower than that of a row with only a larger micro-batch."""
    own = row.published.time_per_iteration_s or 0.0
    slowest = None
    least = 0.0
    for other in _with_larger_micro(row):
        seconds = other.published.time_per_iteration_s
        if seconds and least < seconds < own:
            slowest = other
            least = seconds
    if slowest:
        yield row.compare(
            "time",
            row.text_of(TIME) or own,
            f"at most {least:g} s, "
            f"as {slowest.name} took for micro-batch {slowest.micro}",
            None,
        )


def _alike(row: CheckedRow) -> list[CheckedRow]:
    """Return the other rows, different in at most the micro-batch."""
    same = configuration(row, but_micro=True)
    others = (other for other in row.source.rows if other is not row)
    return [other for other in others if configuration(other, but_micro=True) == same]


def _with_larger_micro(row: CheckedRow) -> list[CheckedRow]:
    return [other for other in _alike(row) if other.micro > row.micro]


def configuration(row: CheckedRow, but_micro: bool = False) -> tuple[Any, ...]:
    """Return everything that a speed depends on, perhaps without the micro-batch."""
    recipe = row.recipe
    batch = recipe.batch
    return (
        recipe.model,
        recipe.sequence_length,
        recipe.parallel,
        batch.accumulation,
        () if but_micro else (batch.micro, batch.global_),
        recipe.activation_checkpointing,
        recipe.ds_config,
        row.value("hardware.name"),
        row.gpus,
        row.published.framework,
    )


# --- memory


def memory(row: CheckedRow) -> Checks:
    """Check model states against the GPU's memory and an OOM, and cached memory between the two."""
    capacity = row.value("hardware.gpu_memory_gb")
    published = row.published
    quantity = "out of memory" if published.oom else "model states"
    ran = "OOM" if published.oom else f"ran on {capacity or 0:g} GB"
    try:
        states = states_gb(row)
    except ConfigError as error:
        why = f"its layout cannot be run here: {error}"
        yield row.not_checkable(quantity, why, ran)
        return
    held = f"{states:.1f} GB"
    if published.oom:
        yield _out_of_memory(row, states, capacity)
    elif capacity is None:
        why = "no memory of its GPUs is known"
        yield row.not_checkable(quantity, why, computed=held)
    else:
        how = "they fit" if states <= capacity else None
        yield row.compare(quantity, ran, held, how)
    cached = published.cached_gb
    if cached is None:
        return
    limits = f"{held} of model states"
    if capacity:
        limits += f" to {capacity:g} GB"
    between = states <= cached <= (capacity or cached)
    how = "between them: bounds, no value" if between else None
    yield row.compare(
        "cached", row.text_of("published.cached_gb") or cached, limits, how
    )
    larger = [r for r in _with_larger_micro(row) if r.published.cached_gb]
    if larger:
        other = min(larger, key=lambda r: r.published.cached_gb or 0.0)
        least = other.published.cached_gb or 0.0
        how = "no more than a larger batch" if cached <= least else None
        yield row.compare(
            "cached, over micro-batches",
            f"{cached:g}",
            f"at most {least:g} GB, as {other.name} had for micro-batch {other.micro}",
            how,
        )


def states_gb(row: CheckedRow) -> float:
    """Predict the model states on the fullest GPU during the update, in GB (10^9). Raises ConfigError."""
    return memory_of_plan(published_plan(row.recipe)).states / 1e9


def _out_of_memory(row: CheckedRow, states: float, capacity: float | None) -> LineCheck:
    """Check an OOM: a larger batch that ran contradicts it, larger model states confirm it."""
    for other in _alike(row):
        if not other.published.oom and other.micro >= row.micro:
            return row.compare(
                "out of memory",
                "OOM",
                f"micro-batch {other.micro} of the same model ran",
                None,
            )
    if capacity and states > capacity:
        return row.compare(
            "out of memory",
            "OOM",
            f"{states:.1f} GB of model states on {capacity:g} GB",
            "they do not fit",
        )
    return row.not_checkable(
        "out of memory",
        "the model states fit: activations decide, which nothing printed gives",
        "OOM",
    )
