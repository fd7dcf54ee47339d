"""Compare runs: differences of their configurations and of their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launch.console.text_table import NOTHING, loss, number, ratio
from launch.reports.entries import (
    COUNTS,
    PEAK,
    QUANTITIES,
    RATES,
    SPLITS,
    TIME,
    Column,
    loss_columns,
    spread,
)
from launch.reports.frames import ReportTable
from launch.reports.runs import ReportedRun
from recipes import key_paths
from recipes.key_paths import NO_NUMBER, PLACES, TEXT
from recipes.problems import counted

MOST_COMPARED = 6  # runs; a table of more columns is unreadable
ABSENT = "absent"

# Parts of a recipe that are shown elsewhere or change nothing.
OMITTED = {*NO_NUMBER - {"run"}, "branch"}
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
        remarks: why losses are not comparable.
        findings: differences of the loss curves.
    """

    runs: Sequence[ReportedRun]
    results: ReportTable
    configuration: ReportTable
    remarks: list[str]
    findings: list[str]


def compare(runs: Sequence[ReportedRun]) -> Comparison:
    """Compare the first run with each of the others."""
    first, *others = runs
    why_not = [incomparable(first, run) for run in others]
    findings = []
    for run, why in zip(others, why_not, strict=True):
        if not why:
            findings.append(curve_finding(first, run))
    labels = ("", *(run.label for run in runs))
    headings = (*labels, *(f"{run.label}, next to {first.label}" for run in others))
    kinds = ("name", *["text"] * len(runs), *["change"] * len(others))
    outcomes = list(result_rows(runs, why_not))
    results = ReportTable(headings, kinds, outcomes, "Results", style="results")
    made = "What differs in how they were made"
    differing = list(configuration(runs))
    keys = ReportTable(labels, kinds, differing, made, style="differences")
    return Comparison(runs, results, keys, [*filter(None, why_not)], findings)


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
    """Yield every quantity that any run has, with the changes from the first run."""
    first, *others = runs
    figures = [figure for run in runs for figure in run.result.figures]
    losses = [column for split in SPLITS for column in loss_columns(split, figures)]
    for column in (*COUNTS, *losses, *QUANTITIES):
        values = [column.of(run.result) for run in runs]
        show = loss if column.change == "loss" else number
        if any(value is not None for value in values):
            changes = []
            for run, why in zip(others, why_not, strict=True):
                changes.append(_change(first, run, column, why))
            yield column.heading, *map(show, values), *changes
        if column.key == TIME and any(run.result.speed.quartiles_s for run in runs):
            spreads = (spread(run.result) for run in runs)
            yield "half of the steps (s)", *spreads, *[""] * len(others)


def _change(a: ReportedRun, b: ReportedRun, column: Column, why: str | None) -> str:
    """Write the change from `a` to `b`, or why there is none; `why`: against comparing losses."""
    first = column.of(a.result)
    value = column.of(b.result)
    if first is None or value is None or column.change == "none":
        return NOTHING
    if column.change == "loss" and why:
        return "not comparable"
    one = _spread(a, column)
    other = _spread(b, column)
    if one and other and max(one[0], other[0]) <= min(one[1], other[1]):
        return "within the spread"
    kinds = {a.result.memory.kind, b.result.memory.kind} - {None}
    if column.key == PEAK and len(kinds) > 1:
        return "memory of another kind"
    if column.change == "ratio":
        return ratio(value / first) if first else NOTHING
    change = value - first
    return f"{change:+,}" if isinstance(change, int) else f"{change:+.4g}"


def _spread(run: ReportedRun, column: Column) -> tuple[float, float] | None:
    """Return between which values of a speed half of the steps lie; runs that overlap are equally fast."""
    speed = run.result.speed
    if column.key == TIME:
        return speed.quartiles_s
    return speed.spread_of(column.of(run.result)) if column.key in RATES else None


def incomparable(a: ReportedRun, b: ReportedRun) -> str | None:
    """Return why the losses of two runs are not comparable; None if they are."""
    beginning = f"the losses of {a.label} and {b.label} are not comparable"
    if a.recipe is None or b.recipe is None:
        unread = a if a.recipe is None else b
        return f"{beginning}: the recipe of {unread.label} cannot be read"
    own = a.result.entropies
    entropies = b.result.entropies
    same = own.same_text(entropies)
    masked = a.recipe.model.facts.masked or b.recipe.model.facts.masked
    changed = []
    for key, one, other in key_paths.changes(a.recipe, b.recipe, TEXT):
        if key == "model.family" and not masked:  # two names of one objective
            continue
        if not (same and key in PLACES):
            changed.append(f"{key}: {_text(one)} / {_text(other)}")
    if changed:
        return (
            f"{beginning}, other data, vocabulary or objective ({', '.join(changed)})"
        )
    samples = a.recipe.run.validation_samples != b.recipe.run.validation_samples
    if same or samples or not (own.unigram and entropies.unigram):
        return None
    return (
        f"{beginning}: the unigram entropy of their validation text differs ({own.unigram:.4f} / "
        f"{entropies.unigram:.4f}), so that they did not read the same text in the same tokens"
    )


def curve_finding(a: ReportedRun, b: ReportedRun) -> str:
    """Say at which step the training losses of two runs part, and by how much at most."""
    second = dict(b.training)
    common = [(step, own, second[step]) for step, own in a.training if step in second]
    losses = f"training {a.result.figures[0].name} of {a.label} and {b.label}"
    if not common:
        return f"{losses}: no common step"
    precisions = (run.result.precision or "fp32" for run in (a, b))
    tolerance = max(ROUNDING.get(each, ROUNDING["fp32"]) for each in precisions)
    rounding = f"rounding ({tolerance:.1e} of the loss)"
    parted = f"equal to {rounding}"
    for step, own, other in common:
        by = abs(own - other)
        if by > tolerance * max(abs(own), abs(other)):
            parted = (
                f"first differ by more than {rounding} at step {step:,.0f}, by {by:.2e}"
            )
            break
    step, own, other = max(common, key=lambda each: abs(each[1] - each[2]))
    largest = f"largest difference {abs(own - other):.2e} at step {step:,.0f}"
    return f"{losses}, {counted(len(common), 'common step')}: {parted}; {largest}"


def _facts(run: ReportedRun) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "recipe": f"{run.name}{' (tiny)' * run.tiny}",
        "ds_config": run.result.ds_config,
        "implementation": run.result.implementation or ABSENT,
        "precision": run.result.precision_text,
    }
    if run.launch:
        facts |= run.launch.machine
    plan = run.plan
    if plan:
        recipe = plan.recipe.model_dump(mode="json", by_alias=True, exclude=OMITTED)
        facts |= {f"recipe.{key}": value for key, value in recipe.items()}
        facts["deepspeed"] = plan.ds
        facts |= {"ds_config": plan.ds_name, "layout": vars(plan.layout)}
        if plan.recipe.branch:
            facts["branch of"] = str(plan.recipe.branch)
    return facts


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
