"""Checks of task scores: their parts, other models of the table, length of the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from modeling import cost
from recipes.schema import Downstream
from tools.tables import transcription
from tools.tables.lines import CheckedRow, CheckedTable, Checks, Line, value_of
from tools.tables.printed import Printed, agreement, recompute

# Questions of RACE's test set, middle and high schools (Lai et al. 2017, arXiv 1704.04683, table 3).
RACE_TEST = (1436, 3498)
# Scores that fine-tuning prints; more is better.
PARTS = {
    "mnli": ("matched", "mismatched"),
    "qqp": ("accuracy",),
    "squad1": ("f1", "em"),
    "squad2": ("f1", "em"),
    "race": ("accuracy", "middle", "high"),
}
SCORES = [f"{task}.{part}" for task, parts in PARTS.items() for part in parts]


def checks(source: CheckedTable, singles: Mapping[str, Downstream]) -> Checks:
    """Check all scores of a table, including lines of other models.

    `singles`: scores of the models, one by one, that the table's ensembles are of.
    """
    own = sorted(
        (row for row in source.rows if row.published.downstream), key=_parameters
    )
    for line in source.others:
        yield from transcription.other_model(line)
    for line in (*own, *source.others):
        yield from _trained_tokens(line, own)
        yield from _race(line)
        yield from _squad(line)
        yield from _ensemble(line, singles)
    yield from _monotonic(own)


def _parameters(row: CheckedRow) -> int:
    return cost.parameters(row.recipe.model, row.recipe.positions)


def _trained_tokens(line: Line, own: Sequence[Line]) -> Checks:
    """Check the tokens of the pretraining relative to those of the table's smallest model."""
    ratio = line.published.trained_tokens
    if ratio is None:
        return
    printed = Printed.read(f"{ratio:g}")
    smallest = own[0].pretraining if own else None
    assert printed and line.pretraining and smallest, line.full_name
    computed = prod(line.pretraining) / prod(smallest)
    ours, least = (
        f"{steps:,} x {batch} x {length}"
        for steps, batch, length in (line.pretraining, smallest)
    )
    how = agreement(printed, computed)
    yield line.compare(
        "trained tokens", printed.text, f"{ours} over {least} = {computed:.3g}", how
    )


def _race(line: Line) -> Checks:
    """Check that the accuracy is the mean of its parts by their questions."""
    race = line.value("published.downstream.race")
    if race and race.middle is not None and race.high is not None:
        values = (race.accuracy, race.middle, race.high)  # printed with one decimal
        whole, *parts = (
            printed for value in values if (printed := Printed.read(f"{value:.1f}"))
        )

        def mean(middle: float, high: float) -> float:
            return (RACE_TEST[0] * middle + RACE_TEST[1] * high) / sum(RACE_TEST)

        computed, how = recompute(whole, "the parts", mean, *parts)
        questions = f"{RACE_TEST[0]} x {race.middle} + {RACE_TEST[1]} x {race.high}"
        yield line.compare(
            "RACE, of middle and high",
            whole.text,
            f"({questions}) / {sum(RACE_TEST)} = {computed:.2f}",
            how,
        )


def _squad(line: Line) -> Checks:
    """Check that exact matches are no more than F1: such an answer has all its words."""
    for name, task in (("SQuAD 1.1", "squad1"), ("SQuAD 2.0", "squad2")):
        scores = line.value(f"published.downstream.{task}")
        if scores:
            how = "no more than F1" if scores.em <= scores.f1 else None
            yield line.compare(
                f"{name}, exact matches", scores.em, f"at most F1, {scores.f1}", how
            )


def _ensemble(line: Line, singles: Mapping[str, Downstream]) -> Checks:
    """Check that models together do no worse than one of them."""
    for name in SCORES if line.published.ensemble else ():
        joined = _score(line, name)
        alone = value_of(singles.get(line.name), name)
        if joined is not None and alone is not None:
            how = "no less than one model" if joined >= alone else None
            yield line.compare(
                f"ensemble, {name}", joined, f"at least {alone}, of one model", how
            )


def _monotonic(lines: Sequence[Line]) -> Checks:
    """Check that scores improve with size "in all cases", as the A100 blog says."""
    for smaller, larger in pairwise(lines):
        for name in SCORES:
            before = _score(smaller, name)
            after = _score(larger, name)
            if before is not None and after is not None:
                how = "better with size" if after > before else None
                yield larger.compare(
                    f"size, {name}", after, f"above {before}, of {smaller.name}", how
                )


def _score(line: Line, name: str) -> Any:
    return line.value(f"published.downstream.{name}")
