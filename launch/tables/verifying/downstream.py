"""Scores on tasks: what they owe their parts, the table's other models and the length of the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from launch.tables.verifying.cells import prints
from launch.tables.verifying.evidence import Evidence, OtherModel
from launch.tables.verifying.printed_values import Printed, derived
from launch.tables.verifying.rows import HEADINGS, Check, Row, Status, value_of
from modeling import cost
from recipes.schema import Downstream, Published
from recipes.tables import Table

# Questions of RACE's test set, middle and high schools (Lai et al. 2017, arXiv 1704.04683, table 3).
RACE_TEST = (1436, 3498)
# Scores that fine-tuning prints, with what is better: more.
SCORES = (
    "mnli.matched", "mnli.mismatched", "qqp.accuracy", "squad1.f1", "squad1.em", "squad2.f1", "squad2.em",
    "race.accuracy", "race.middle", "race.high",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of a table that prints scores; `tokens` of its pretraining, with their factors as text."""

    table: str
    name: str
    published: Published
    scores: Downstream
    tokens: tuple[int, str] | None

    def check(self, quantity: str, printed: object, computed: object, how: str | None) -> Check:
        """Agrees where `how` says in which way."""
        return self.say("agrees" if how else "disagrees", quantity, printed, computed, how or "")

    def say(self, status: Status, quantity: str, printed: object, computed: object, how: str) -> Check:
        subject = f"{self.table}/{self.name}"
        return Check(self.table, subject, quantity, status, str(printed), str(computed), how)

    def score(self, name: str) -> float | None:
        value = value_of(self.scores, name)
        return None if value is None else float(value)


def checks(
    table: Table, rows: Sequence[Row], evidence: Evidence, singles: Mapping[str, Downstream]
) -> Iterator[Check]:
    """Everything about the scores of a table, lines of other models included.

    Args:
        rows: of the table.
        singles: scores of the models, one by one, that the table's ensembles are of.
    """
    own = [line for row in sorted(rows, key=_parameters) if (line := _line_of(row))]
    others = [_line_of_other(table, name, other) for name, other in evidence.others.items()]
    for name, other in evidence.others.items():
        yield from _cells(table, name, other)
    for line in (*own, *others):
        if line.published.trained_tokens is not None:
            yield _trained_tokens(line, line.published.trained_tokens, own[0] if own else None)
        yield from _parts(line)
        if line.published.ensemble:
            yield from _ensemble(line, singles.get(line.name))
    yield from _monotonic(own)


def scores_of(rows: Sequence[Row], evidence: Evidence) -> dict[str, Downstream]:
    """The scores of every line of a table by its name."""
    found = {row.name: row.published.downstream for row in rows}
    found |= {name: other.published.downstream for name, other in evidence.others.items()}
    return {name: scores for name, scores in found.items() if scores}


def _parameters(row: Row) -> int:
    return cost.parameters(row.recipe.model, row.recipe.positions)


def _line_of(row: Row) -> Line | None:
    recipe, scores = row.recipe, row.published.downstream
    if scores is None:
        return None
    factors = (recipe.steps, recipe.batch.global_, recipe.sequence_length)
    return Line(row.table.name, row.name, row.published, scores, _tokens(*factors))


def _line_of_other(table: Table, name: str, other: OtherModel) -> Line:
    trained, published = other.pretraining, other.published
    tokens = _tokens(trained.steps, trained.batch, trained.sequence_length) if trained else None
    return Line(table.name, name, published, published.downstream or Downstream(), tokens)


def _tokens(steps: int, batch: int, length: int) -> tuple[int, str]:
    return steps * batch * length, f"{steps:,} x {batch} x {length}"


def _cells(table: Table, name: str, other: OtherModel) -> Iterator[Check]:
    """A line of another model against its own cells."""
    line = _line_of_other(table, name, other)
    cells = [cell.strip() for cell in (other.published.row or "").split("|")]
    exact = "exact" if len(cells) == len(table.columns) else None
    yield replace(line.check("cells", table.columns, len(cells), exact), transcribed=True)
    for heading, cell in zip(table.columns, cells, strict=False):
        if key := HEADINGS.get(heading.casefold()):
            own = value_of(other, key.name)
            how = "exact" if prints(cell, key, own) else None
            yield replace(line.check(f'cell "{heading}"', cell, own, how), transcribed=True)


def _trained_tokens(line: Line, ratio: float, smallest: Line | None) -> Check:
    """Tokens of the pretraining over those of the table's smallest model: steps, batch and length of each."""
    printed = Printed.read(f"{ratio:g}")
    assert printed
    if line.tokens is None or smallest is None or smallest.tokens is None:
        why = "no source gives the length of its pretraining"
        return line.say("not checkable", "trained tokens", printed.text, "", why)
    computed = line.tokens[0] / smallest.tokens[0]
    _, how = derived(printed, "", lambda: computed)
    said = f"{line.tokens[1]} over {smallest.tokens[1]} = {computed:.3g}"
    return line.check("trained tokens", printed.text, said, how)


def _parts(line: Line) -> Iterator[Check]:
    """RACE's accuracy is the mean of its parts by their questions; what matches exactly has its words."""
    race = line.scores.race
    if race and race.middle is not None and race.high is not None:
        whole, *parts = (_tenths(value) for value in (race.accuracy, race.middle, race.high))

        def mean(middle: float, high: float) -> float:
            return (RACE_TEST[0] * middle + RACE_TEST[1] * high) / sum(RACE_TEST)

        computed, how = derived(whole, "the parts", mean, *parts)
        questions = f"{RACE_TEST[0]} x {race.middle} + {RACE_TEST[1]} x {race.high}"
        said = f"({questions}) / {sum(RACE_TEST)} = {computed:.2f}"
        yield line.check("RACE, of middle and high", whole.text, said, how)
    for name, scores in (("SQuAD 1.1", line.scores.squad1), ("SQuAD 2.0", line.scores.squad2)):
        if scores:
            how = "no more than F1" if scores.em <= scores.f1 else None
            yield line.check(f"{name}, exact matches", scores.em, f"at most F1, {scores.f1}", how)


def _tenths(value: float) -> Printed:
    """A score with the one decimal that the tables print."""
    printed = Printed.read(f"{value:.1f}")
    assert printed
    return printed


def _ensemble(line: Line, single: Downstream | None) -> Iterator[Check]:
    """Models that answer together do no worse than one of them."""
    for name in SCORES:
        joined, alone = line.score(name), None if single is None else value_of(single, name)
        if joined is not None and alone is not None:
            how = "no less than one model" if joined >= alone else None
            yield line.check(f"ensemble, {name}", joined, f"at least {alone}, of one model", how)


def _monotonic(lines: Sequence[Line]) -> Iterator[Check]:
    """The A100 blog: as the model size increases, the downstream task accuracies improve in all cases."""
    for smaller, larger in pairwise(lines):
        for name in SCORES:
            before, after = smaller.score(name), larger.score(name)
            if before is not None and after is not None:
                how = "better with size" if after > before else None
                yield larger.check(f"size, {name}", after, f"above {before}, of {smaller.name}", how)
