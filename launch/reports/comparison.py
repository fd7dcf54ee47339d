"""Compare runs: differences of their configurations and of their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from launch.console.text_table import NOTHING, loss, number, ratio
from launch.reports.entries import (
    COUNTS,
    QUANTITIES,
    SPEEDS,
    SPLITS,
    TIME,
    Column,
    loss_columns,
    spread,
)
from launch.reports.frames import ReportTable
from launch.reports.runs import ReportedRun, differences
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
    "branch",
}
# Keys that decide the text and the tokens of the loss.
SAME_TEXT = (
    "data",
    "model.vocab_size",
    "model.family",
    "model.sentence_head",
    "model.task_head",
    "task.name",
)
SAME_TEXT_BUT = ("data.streaming",)
OF_BERT = "data.masking."

# Relative difference of two losses due to rounding. fp32: `compare_layouts` measures 1.5e-7 between layouts
# after 20 steps, and training amplifies it. fp16 and bf16: one unit in the last place of the activations
# (11 and 8 significant bits).
ROUNDING = {"fp32": 2e-6, "fp16": 2.0**-11, "bf16": 2.0**-8}


@dataclass(frozen=True)
class Comparison:
    """The first run compared with each of the others.

    Attributes:
        results: a value per run, and the change from the first run to each other.
        configuration: the keys that differ.
        remarks: cautions for the reader.
        findings: differences of the loss curves.
    """

    runs: list[ReportedRun]
    results: ReportTable
    configuration: ReportTable
    remarks: list[str]
    findings: list[str]


def compare(runs: Sequence[ReportedRun]) -> Comparison:
    """Compare the first readable run with each of the others."""
    first = next((run for run in runs if run.readable), runs[0])
    others = [run for run in runs if run is not first]
    why_not = [incomparable(first, run) for run in others]
    remarks: list[str] = []
    findings: list[str] = []
    if first is not runs[0]:
        remarks.append(
            f"{runs[0].label} cannot be read: the runs are compared with {first.label}"
        )
    for run, why in zip(others, why_not, strict=True):
        remarks += [*([why] if why else []), *cautions(first, run)]
        findings += [] if why else curve_findings(first, run)
    runs = [first, *others]
    labels = tuple(run.label for run in runs)
    changed = tuple(f"{label}, next to {labels[0]}" for label in labels[1:])
    kinds = ("name", *["text"] * len(runs), *["change"] * len(others))
    outcomes = list(result_rows(runs, why_not))
    results = ReportTable(
        ("", *labels, *changed), kinds, outcomes, "Results", style="results"
    )
    made = "What differs in how they were made"
    keys = ReportTable(
        ("", *labels), kinds, list(configuration(runs)), made, style="differences"
    )
    return Comparison(runs, results, keys, list(dict.fromkeys(remarks)), findings)


def configuration(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, ...]]:
    """Yield the dotted keys that differ between runs: recipe, layout, DeepSpeed JSON, machine, commit."""
    facts = [dict(key_paths.flatten(_facts(run))) for run in runs]
    for key in dict.fromkeys(key for each in facts for key in each):
        values = [each.get(key, ABSENT) for each in facts]
        if any(value != values[0] for value in values):
            yield key, *map(_text, values)


def result_rows(
    runs: Sequence[ReportedRun], why_not: Sequence[str | None]
) -> Iterator[tuple[str, ...]]:
    """Yield every quantity that any run has.

    Incomparable losses get no difference, and speeds no ratio where half of the steps of both overlap.
    """
    statuses = [run.status + (" (tiny)" if run.tiny else "") for run in runs]
    yield (
        "status",
        *statuses,
        *("" if status == statuses[0] else "differs" for status in statuses[1:]),
    )
    figures = [figure for run in runs for figure in run.result.figures]
    losses = [column for split in SPLITS for column in loss_columns(split, figures)]
    for column in (*COUNTS, *losses, *QUANTITIES):
        values = [column.of(run.result) for run in runs]
        if any(value is not None for value in values):
            show = loss if column.change == "loss" else number
            changes = []
            for run, value, why in zip(runs[1:], values[1:], why_not, strict=True):
                if column.change == "loss" and why:
                    changes.append("not comparable")
                elif column.key in SPEEDS and _overlap(
                    _spread(runs[0], column), _spread(run, column)
                ):
                    changes.append("within the spread")
                else:
                    changes.append(_change(values[0], value, column))
            yield column.heading, *map(show, values), *changes
        if column.key == TIME and any(run.result.speed.quartiles_s for run in runs):
            spreads = [spread(run.result) for run in runs]
            yield "half of the steps (s)", *spreads, *[""] * len(why_not)


def _spread(run: ReportedRun, column: Column) -> tuple[float, float] | None:
    speed = run.result.speed
    return (
        speed.quartiles_s
        if column.key == TIME
        else speed.spread_of(column.of(run.result))
    )


def _overlap(
    one: tuple[float, float] | None, other: tuple[float, float] | None
) -> bool:
    """Check whether two spreads overlap, so that neither run is the faster one."""
    if one is None or other is None:
        return False
    lows, highs = zip(one, other, strict=True)
    return max(lows) <= min(highs)


def incomparable(a: ReportedRun, b: ReportedRun) -> str | None:
    """Return why the losses of two runs are not comparable; None if they are."""
    beginning = f"the losses of {a.label} and {b.label} are not comparable"
    if a.recipe is None or b.recipe is None:
        unread = a if a.recipe is None else b
        return f"{beginning}: the recipe of {unread.label} cannot be read"
    both_gpt = a.recipe.model.family == b.recipe.model.family == "gpt2"
    same = (*SAME_TEXT_BUT, *([OF_BERT] if both_gpt else []))
    both = (a.recipe.compared(), b.recipe.compared())
    for run, values in zip((a, b), both, strict=True):
        if run.vocabulary:  # where it was read from does not matter
            values["data"]["tokenizer"] = {"content": run.vocabulary}
    changed = []
    for key, one, other in key_paths.differences(*both):
        if key_paths.is_part(key, SAME_TEXT) and not key.startswith(same):
            changed.append(f"{key}: {_text(one)} / {_text(other)}")
    if changed:
        return (
            f"{beginning}, other data, vocabulary or objective ({', '.join(changed)})"
        )
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


def cautions(a: ReportedRun, b: ReportedRun) -> Iterator[str]:
    """Yield further causes of a difference between two comparable losses."""
    if a.recipe is None or b.recipe is None:
        return
    pair = f"{a.label} and {b.label}"
    one = a.recipe
    two = b.recipe
    text = "after the same step they have read different amounts of text"
    easier = "a token with more before it is easier to predict"
    samples = (one.run.validation_samples, two.run.validation_samples)
    for what, own, other, so in (
        ("have different global batches", one.batch.global_, two.batch.global_, text),
        (
            "have different sequence lengths",
            one.sequence_length,
            two.sequence_length,
            easier,
        ),
        (
            "have different seeds",
            one.seed,
            two.seed,
            "other initial weights and other batches",
        ),
        (
            "validate on different numbers of samples",
            *samples,
            "compare their training losses",
        ),
    ):
        if own != other:
            yield f"{pair} {what} ({own} / {other}): {so}"
    if a.tiny != b.tiny:
        small = a.label if a.tiny else b.label
        yield f"{small} is tiny, the other is not: its speed and its loss say nothing about the other's"
    kinds = [run.result.memory.kind for run in (a, b)]
    if None not in kinds and kinds[0] != kinds[1]:  # None: the run recorded no step
        yield f"{pair} count different kinds of memory ({kinds[0]} / {kinds[1]})"


def curve_findings(a: ReportedRun, b: ReportedRun) -> Iterator[str]:
    """Yield the step at which two loss curves part, and the largest difference."""
    precisions = (
        run.result.precision or (run.recipe.precision if run.recipe else "fp32")
        for run in (a, b)
    )
    tolerance = max(
        ROUNDING.get(precision, ROUNDING["fp32"]) for precision in precisions
    )
    rounding = f"rounding ({tolerance:.1e} of the loss)"
    for name, what in (("training", "step"), ("validation", "validation")):
        first = dict(getattr(a, name))
        second = dict(getattr(b, name))
        apart = differences(getattr(a, name), getattr(b, name))
        loss_name = f"{name} {a.result.figures[0].name}"
        beginning = f"{loss_name} of {a.label} and {b.label}, {counted(len(apart), f'common {what}')}"
        if not apart:
            yield f"{beginning}: nothing to compare"
            continue
        step, by = max(apart, key=itemgetter(1))
        largest = f"largest difference {by:.2e} at step {step:,.0f}"
        size = {step: max(abs(first[step]), abs(second[step])) for step, _ in apart}
        step, by = next(
            ((step, by) for step, by in apart if by > tolerance * size[step]), (0, 0.0)
        )
        parted = (
            f"first differ by more than {rounding} at step {step:,.0f}, by {by:.2e}"
        )
        yield f"{beginning}: {parted if by else f'equal to {rounding}'}; {largest}"


def _facts(run: ReportedRun) -> dict[str, Any]:
    plan = run.plan
    result = run.result
    machine = {**run.machine}
    recipe = (
        plan.recipe.model_dump(mode="json", by_alias=True, exclude=OMITTED)
        if plan
        else {}
    )
    versions, git = (machine.pop(key, None) or {} for key in ("versions", "git"))
    return {
        "recipe": run.name + (" (tiny)" if run.tiny else ""),
        "branch of": str(plan.recipe.branch) if plan and plan.recipe.branch else ABSENT,
        "ds_config": plan.ds_name if plan else result.ds_config,
        "implementation": result.implementation or ABSENT,
        "layout": vars(plan.layout) if plan else {},
        "precision": result.precision_text,
        "hardware": machine,
        "versions": versions,
        "git": git,
        **{f"recipe.{key}": value for key, value in recipe.items()},
        **{
            f"deepspeed.{key}": value
            for key, value in (plan.ds if plan else {}).items()
        },
    }


def _change(first: float | None, value: float | None, column: Column) -> str:
    if first is None or value is None or (column.change == "ratio" and not first):
        return NOTHING
    if column.change == "ratio":
        return ratio(value / first)
    return (
        f"{value - first:+,}"
        if isinstance(value - first, int)
        else f"{value - first:+.4g}"
    )


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
