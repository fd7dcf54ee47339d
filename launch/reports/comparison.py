"""Compare runs: differences of their configurations and of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from launch.console import numbers
from launch.records.result import Result
from launch.reports.entries import validation_loss
from launch.reports.frames import Frame
from launch.reports.runs import Run, differences
from recipes import key_paths
from recipes.problems import counted

MOST_COMPARED = 6  # runs; a table of more columns is unreadable
ABSENT = "absent"

# Parts of a recipe that are shown elsewhere or change nothing.
OMITTED = {
    "title",
    "published",
    "inferred",
    "differs",
    "unknown",
    "note",
    "hardware",
    "parallel",
    "ds_config",
}
MACHINE = (
    "cpu",
    "cores",
    "memory_gb",
    "accelerator",
    "accelerators",
    "accelerator_memory_gb",
    "cuda",
    "host",
)
# Keys that decide the text and the tokens of the loss.
SAME_TEXT = ("data", "model.vocab_size", "model.family", "model.sentence_head")
SAME_TEXT_BUT = ("data.streaming",)
OF_BERT = "data.masking."

# Relative difference of two losses due to rounding. fp32: `compare_layouts` measures 1.5e-7 between layouts
# after 20 steps, and training amplifies it. fp16 and bf16: one unit in the last place of the activations
# (11 and 8 significant bits).
ROUNDING = {"fp32": 2e-6, "fp16": 2.0**-11, "bf16": 2.0**-8}


class Quantity(NamedTuple):
    """A quantity of a result. `kind`: compare by difference or ratio; losses by difference, if comparable."""

    name: str
    of: Callable[[Result], Any]
    kind: Literal["difference", "ratio", "loss"]


QUANTITIES = (
    Quantity("steps", lambda r: r.steps, "difference"),
    Quantity("skipped steps", lambda r: r.skipped_steps, "difference"),
    Quantity("training loss (nats, last 10 steps)", lambda r: r.losses.training.loss, "loss"),
    Quantity("validation loss (nats)", validation_loss, "loss"),
    Quantity("test loss (nats)", lambda r: r.losses.test and r.losses.test.loss, "loss"),
    Quantity("time per step (s)", lambda r: r.speed.seconds_per_step, "ratio"),
    Quantity("waiting for data (share of the time)", lambda r: r.speed.data_wait_share, "difference"),
    Quantity("samples/s", lambda r: r.speed.samples_per_s, "ratio"),
    Quantity("tokens/s", lambda r: r.speed.tokens_per_s, "ratio"),
    Quantity("TFLOPS per GPU, formula", lambda r: r.speed.tflops, "ratio"),
    Quantity("TFLOPS per GPU, exact count", lambda r: r.speed.exact_tflops, "ratio"),
    Quantity("peak memory (GB)", lambda r: numbers.gigabytes(r.memory.peak_bytes), "ratio"),
    Quantity("cached memory (GB)", lambda r: numbers.gigabytes(r.memory.cached_bytes), "ratio"),
    Quantity("parameters", lambda r: r.parameters, "ratio"),
)


@dataclass(frozen=True)
class Comparison:
    """The first run compared with each of the others.

    Attributes:
        results: a value per run, and the change from the first run to each other.
        configuration: the keys that differ.
        remarks: cautions for the reader.
        findings: differences of the loss curves.
    """

    runs: list[Run]
    results: Frame
    configuration: Frame
    remarks: list[str]
    findings: list[str]


def compare(runs: Sequence[Run]) -> Comparison:
    """Compare the first readable run with each of the others."""
    first = next((run for run in runs if run.readable), runs[0])
    others = [run for run in runs if run is not first]
    why_not = [incomparable(first, run) for run in others]
    remarks: list[str] = []
    findings: list[str] = []
    if first is not runs[0]:
        remarks.append(f"{runs[0].label} cannot be read: the runs are compared with {first.label}")
    for run, why in zip(others, why_not, strict=True):
        remarks += [*([why] if why else []), *cautions(first, run)]
        findings += [] if why else curve_findings(first, run)
    runs = [first, *others]
    labels = tuple(run.label for run in runs)
    changed = tuple(f"{label}, next to {labels[0]}" for label in labels[1:])
    kinds = ("name", *["text"] * len(runs), *["change"] * len(others))
    results = Frame(
        ("", *labels, *changed), kinds, list(result_rows(runs, why_not)), "Results", style="results"
    )
    made = "What differs in how they were made"
    keys = Frame(("", *labels), kinds, list(configuration(runs)), made, style="differences")
    return Comparison(runs, results, keys, list(dict.fromkeys(remarks)), findings)


def configuration(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield the dotted keys that differ between runs: recipe, layout, DeepSpeed JSON, machine, commit."""
    facts = [dict(key_paths.flatten(_facts(run))) for run in runs]
    for key in dict.fromkeys(key for each in facts for key in each):
        values = [each.get(key, ABSENT) for each in facts]
        if any(value != values[0] for value in values):
            yield key, *map(_text, values)


def result_rows(runs: Sequence[Run], why_not: Sequence[str | None]) -> Iterator[tuple[str, ...]]:
    """Yield every quantity that any run has; incomparable losses get no difference."""
    statuses = [run.status + (" (tiny)" if run.tiny else "") for run in runs]
    yield "status", *statuses, *("" if status == statuses[0] else "differs" for status in statuses[1:])
    parts = (each and each.parts for each in (run.result.losses.validation for run in runs))
    names = dict.fromkeys(name for each in parts for name in each or {})
    of_parts = (Quantity(f"of validation: {name}", partial(_part, name=name), "loss") for name in names)
    for name, of, kind in (*QUANTITIES, *of_parts):
        values = [of(run.result) for run in runs]
        if all(value is None for value in values):
            continue
        changes = (
            "not comparable" if kind == "loss" and why else _change(values[0], value, kind)
            for value, why in zip(values[1:], why_not, strict=True)
        )
        show = numbers.loss if kind == "loss" else numbers.number
        yield name, *map(show, values), *changes


def incomparable(a: Run, b: Run) -> str | None:
    """Return why the losses of two runs are not comparable; None if they are."""
    beginning = f"the losses of {a.label} and {b.label} are not comparable"
    if a.recipe is None or b.recipe is None:
        unread = a if a.recipe is None else b
        return f"{beginning}: the recipe of {unread.label} cannot be read"
    both_gpt = a.recipe.model.family == b.recipe.model.family == "gpt2"
    same = (*SAME_TEXT_BUT, *([OF_BERT] if both_gpt else []))
    both = (recipe.compared() for recipe in (a.recipe, b.recipe))
    changed = [
        f"{key}: {_text(one)} / {_text(other)}"
        for key, one, other in key_paths.differences(*both)
        if key_paths.is_part(key, SAME_TEXT) and not key.startswith(same)
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
    """Yield further causes of a difference between two comparable losses."""
    if a.recipe is None or b.recipe is None:
        return
    pair, one, two = f"{a.label} and {b.label}", a.recipe, b.recipe
    text = "after the same step they have read different amounts of text"
    easier = "a token with more before it is easier to predict"
    samples = (one.run.validation_samples, two.run.validation_samples)
    for what, own, other, so in (
        ("have different global batches", one.batch.global_, two.batch.global_, text),
        ("have different sequence lengths", one.sequence_length, two.sequence_length, easier),
        ("have different seeds", one.seed, two.seed, "other initial weights and other batches"),
        ("validate on different numbers of samples", *samples, "compare their training losses"),
    ):
        if own != other:
            yield f"{pair} {what} ({own} / {other}): {so}"
    if a.tiny != b.tiny:
        small = a.label if a.tiny else b.label
        yield f"{small} is tiny, the other is not: its speed and its loss say nothing about the other's"
    kinds = [run.result.memory.kind for run in (a, b)]
    if None not in kinds and kinds[0] != kinds[1]:  # None: the run recorded no step
        yield f"{pair} count different kinds of memory ({kinds[0]} / {kinds[1]})"


def curve_findings(a: Run, b: Run) -> Iterator[str]:
    """Yield the step at which two loss curves part, and the largest difference."""
    precisions = (run.result.precision or (run.recipe.precision if run.recipe else "fp32") for run in (a, b))
    tolerance = max(ROUNDING.get(precision, ROUNDING["fp32"]) for precision in precisions)
    for name, what in (("training", "step"), ("validation", "validation")):
        first, second = dict(getattr(a, name)), dict(getattr(b, name))
        apart = differences(getattr(a, name), getattr(b, name))
        beginning = f"{name} loss of {a.label} and {b.label}, {counted(len(apart), f'common {what}')}"
        if not apart:
            yield f"{beginning}: nothing to compare"
            continue
        step, by = max(apart, key=itemgetter(1))
        largest = f"largest difference {by:.2e} at step {step:,.0f}"
        parted = f"equal to rounding ({tolerance:.1e} of the loss)"
        for step, by in apart:
            if by > tolerance * max(abs(first[step]), abs(second[step])):
                differ = f"first differ by more than {parted.removeprefix('equal to ')}"
                parted = f"{differ} at step {step:,.0f}, by {by:.2e}"
                break
        yield f"{beginning}: {parted}; {largest}"


def _facts(run: Run) -> dict[str, Any]:
    plan, result, git = run.plan, run.result, run.machine.get("git") or {}
    recipe = plan.recipe.model_dump(mode="json", by_alias=True, exclude=OMITTED) if plan else {}
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


def _part(result: Result, name: str) -> float | None:
    validation = result.losses.validation
    return (validation.parts or {}).get(name) if validation else None


def _change(first: float | None, value: float | None, kind: str) -> str:
    if first is None or value is None or (kind == "ratio" and not first):
        return numbers.NOTHING
    if kind == "ratio":
        return numbers.ratio(value / first)
    return f"{value - first:+,}" if isinstance(value - first, int) else f"{value - first:+.4g}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
