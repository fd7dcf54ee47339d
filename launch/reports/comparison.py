"""Runs next to each other: what differs in how they were made and in what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launch.console import numbers
from launch.reports import curves
from launch.reports.entries import validation_loss
from launch.reports.runs import Run
from launch.runs.result import Result
from recipes.nested import flatten
from recipes.schema import Recipe

MOST_COMPARED = 6  # more columns than that are no table any more
ABSENT = "absent"

# Parts of a recipe that are said elsewhere or change nothing.
LEFT_OUT = {
    *("title", "published", "inferred", "differs", "unknown", "note", "hardware", "parallel", "ds_config")
}
MACHINE = (
    *("cpu", "cores", "memory_gb", "accelerator", "accelerators", "accelerator_memory_gb", "cuda", "host"),
)
# What decides on which text the loss is measured, and in which tokens.
SAME_TEXT = ("data", "model.vocab_size", "model.family", "model.sentence_head")
SAME_TEXT_BUT = ("data.streaming",)
OF_BERT = "data.masking."


@dataclass(frozen=True)
class Outcome:
    """A number that came out. `change`: whether a difference or a ratio says more."""

    name: str
    of: Callable[[Result], Any]
    change: Literal["difference", "ratio"]
    is_loss: bool = False


def _test_loss(result: Result) -> float | None:
    return result.losses.test.loss if result.losses.test else None


OUTCOMES = (
    Outcome("steps", lambda r: r.steps, "difference"),
    Outcome("skipped steps", lambda r: r.skipped_steps, "difference"),
    Outcome(
        "training loss (nats per token, last 10 steps)", lambda r: r.losses.training.loss, "difference", True
    ),
    Outcome("validation loss (nats per token)", validation_loss, "difference", True),
    Outcome("test loss (nats per token)", _test_loss, "difference", True),
    Outcome("time per step (s)", lambda r: r.speed.seconds_per_step, "ratio"),
    Outcome("waiting for data (share of the time)", lambda r: r.speed.data_wait_share, "difference"),
    Outcome("samples/s", lambda r: r.speed.samples_per_s, "ratio"),
    Outcome("tokens/s", lambda r: r.speed.tokens_per_s, "ratio"),
    Outcome("TFLOPS per GPU, formula", lambda r: r.speed.tflops, "ratio"),
    Outcome("TFLOPS per GPU, exact count", lambda r: r.speed.exact_tflops, "ratio"),
    Outcome("peak memory (GB)", lambda r: numbers.gigabytes(r.memory.peak_bytes), "ratio"),
    Outcome("cached memory (GB)", lambda r: numbers.gigabytes(r.memory.cached_bytes), "ratio"),
    Outcome("parameters", lambda r: r.parameters, "ratio"),
)


@dataclass(frozen=True)
class Row:
    """A line of a table: what, a value per run, and how each run after the first differs from it."""

    name: str
    values: tuple[str, ...]
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """`remarks`: what a reader has to know before comparing; `findings`: on the curves."""

    runs: tuple[Run, ...]
    configuration: tuple[Row, ...]  # only what differs
    results: tuple[Row, ...]
    remarks: tuple[str, ...]
    findings: tuple[str, ...]


def compare(runs: Sequence[Run]) -> Comparison:
    """The first of the runs that can be read with each of the others."""
    assert len(runs) >= 2, "a comparison of one run"
    first, asked = next((run for run in runs if run.readable), runs[0]), runs[0]
    others = [run for run in runs if run is not first]
    why_not = {run.label: incomparable(first, run) for run in others}
    remarks = []
    if first is not asked:
        remarks.append(f"{asked.label} cannot be read: the runs are compared with {first.label}")
    for run in others:
        why = why_not[run.label]
        remarks += [*([why] if why else []), *cautions(first, run)]
    findings = [line for run in others if not why_not[run.label] for line in curve_findings(first, run)]
    runs = [first, *others]
    results = tuple(outcomes(runs, why_not))
    unique = tuple(dict.fromkeys(remarks))
    return Comparison(tuple(runs), tuple(configuration(runs)), results, unique, tuple(findings))


def configuration(runs: Sequence[Run]) -> Iterator[Row]:
    """Dotted keys in which runs differ: recipe, layout, DeepSpeed JSON, versions, machine, commit."""
    facts = [dict(flatten(_facts(run))) for run in runs]
    for key in dict.fromkeys(key for each in facts for key in each):
        values = [each.get(key, ABSENT) for each in facts]
        if any(value != values[0] for value in values):
            yield Row(key, tuple(_shown(value) for value in values))


def outcomes(runs: Sequence[Run], why_not: Mapping[str, str | None]) -> Iterator[Row]:
    """Every result that at least one run has; no difference of losses that are not comparable."""
    statuses = [run.status + (" (tiny)" if run.tiny else "") for run in runs]
    differs = tuple("" if status == statuses[0] else "differs" for status in statuses[1:])
    yield Row("status", tuple(statuses), differs)
    for outcome in (*OUTCOMES, *_parts(runs)):
        values = [outcome.of(run.result) for run in runs]
        if all(value is None for value in values):
            continue
        changes = (
            "not comparable"
            if outcome.is_loss and why_not[run.label]
            else _change(values[0], value, outcome.change)
            for run, value in zip(runs[1:], values[1:], strict=True)
        )
        show = numbers.loss if outcome.is_loss else numbers.number
        yield Row(outcome.name, tuple(show(value) for value in values), tuple(changes))


def incomparable(a: Run, b: Run) -> str | None:
    """Why the losses of two runs must not be compared; None where they may."""
    beginning = f"the losses of {a.label} and {b.label} are not comparable"
    if a.recipe is None or b.recipe is None:
        unread = a if a.recipe is None else b
        return f"{beginning}: the recipe of {unread.label} cannot be read"
    first, second = _flat(a.recipe), _flat(b.recipe)
    both_gpt = first["model.family"] == second["model.family"] == "gpt2"
    changed = [
        f"{key}: {_shown(first.get(key, ABSENT))} / {_shown(second.get(key, ABSENT))}"
        for key in {**first, **second}
        if first.get(key, ABSENT) != second.get(key, ABSENT)
        and _decides_text(key)
        and not (both_gpt and key.startswith(OF_BERT))
    ]
    if changed:
        return f"{beginning}, other data, vocabulary or objective ({', '.join(changed)})"
    if a.recipe.run.validation_samples != b.recipe.run.validation_samples:
        return None
    for kind, own in vars(a.result.entropies).items():
        other = getattr(b.result.entropies, kind)
        if own is not None and other is not None and abs(own - other) > 1e-6:
            return (
                f"{beginning}: the {kind} entropy of their validation text differs ({own:.4f} / "
                f"{other:.4f}), so that they did not read the same text in the same tokens"
            )
    return None


def cautions(a: Run, b: Run) -> Iterator[str]:
    """What makes two comparable losses differ besides what one wants to compare."""
    if a.recipe is None or b.recipe is None:
        return
    pair, one, two = f"{a.label} and {b.label}", a.recipe, b.recipe
    if one.batch.global_ != two.batch.global_:
        sizes = f"{pair} have different global batches ({one.batch.global_} / {two.batch.global_})"
        yield f"{sizes}: after the same step they have read different amounts of text"
    if one.sequence_length != two.sequence_length:
        lengths = f"{pair} have different sequence lengths ({one.sequence_length} / {two.sequence_length})"
        yield f"{lengths}: a token with more before it is easier to predict"
    if one.seed != two.seed:
        seeds = f"{pair} have different seeds ({one.seed} / {two.seed})"
        yield f"{seeds}: other initial weights and other batches"
    if one.run.validation_samples != two.run.validation_samples:
        counts = f"{one.run.validation_samples} / {two.run.validation_samples}"
        yield f"{pair} validate on different numbers of samples ({counts}): compare their training losses"
    if a.tiny != b.tiny:
        small = a.label if a.tiny else b.label
        yield f"{small} is tiny, the other is not: its speed and its loss say nothing about the other's"
    kinds = [run.result.memory.kind for run in (a, b)]
    if None not in kinds and kinds[0] != kinds[1]:  # None: of a run that recorded no step
        yield f"{pair} count different kinds of memory ({kinds[0]} / {kinds[1]})"


def curve_findings(a: Run, b: Run) -> Iterator[str]:
    """Where the losses of two comparable runs part, and by how much."""
    for name, what in (("training", "steps"), ("validation", "validations")):
        parts = curves.parting(a, b, getattr(a, name), getattr(b, name))
        beginning = f"{name} loss of {a.label} and {b.label}, {parts.steps:,} common {what}"
        if parts.largest is None:
            yield f"{beginning}: nothing to compare"
            continue
        largest = f"largest difference {parts.largest[1]:.2e} at step {parts.largest[0]:,.0f}"
        rounding = f"rounding ({parts.tolerance:.1e} of the loss)"
        if parts.first is None:
            yield f"{beginning}: equal to {rounding}; {largest}"
        else:
            step, by = parts.first
            parted = f"first differ by more than {rounding} at step {step:,.0f}, by {by:.2e}"
            yield f"{beginning}: {parted}; {largest}"


def _facts(run: Run) -> dict[str, Any]:
    plan, result, git = run.plan, run.result, run.machine.get("git") or {}
    recipe = plan.recipe.model_dump(mode="json", by_alias=True, exclude=LEFT_OUT) if plan else {}
    return {
        "recipe": run.name + (" (tiny)" if run.tiny else ""),
        "ds_config": plan.ds_name if plan else result.ds_config,
        "implementation": result.implementation or ABSENT,
        "layout": vars(plan.layout) if plan else {},
        "precision": result.precision_text,
        "hardware": {key: run.machine.get(key) for key in MACHINE},
        "versions": run.machine.get("versions") or {},
        "commit": git.get("commit", "not known"),
        "uncommitted changes": git.get("dirty", "not known"),
        **{f"recipe.{key}": value for key, value in recipe.items()},
        **{f"deepspeed.{key}": value for key, value in (plan.ds if plan else {}).items()},
    }


def _parts(runs: Sequence[Run]) -> list[Outcome]:
    def of(name: str) -> Callable[[Result], Any]:
        return lambda r: (r.losses.validation.parts or {}).get(name) if r.losses.validation else None

    validations = [run.result.losses.validation for run in runs]
    names = dict.fromkeys(name for each in validations if each for name in each.parts or {})
    return [Outcome(f"of validation: {name}", of(name), "difference", True) for name in names]


def _change(first: float | None, value: float | None, kind: str) -> str:
    if first is None or value is None or (kind == "ratio" and not first):
        return numbers.NOTHING
    if kind == "ratio":
        return numbers.ratio(value / first)
    return f"{value - first:+,}" if isinstance(value - first, int) else f"{value - first:+.4g}"


def _flat(recipe: Recipe) -> dict[str, Any]:
    return dict(flatten(recipe.model_dump(mode="json", by_alias=True)))


def _decides_text(key: str) -> bool:
    return key not in SAME_TEXT_BUT and any(key == part or key.startswith(f"{part}.") for part in SAME_TEXT)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
