"""How wrong the planner is: every published row predicted by constants that never saw its document."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from launch.planning.fitting.cases import Case
from launch.planning.fitting.fitting import Ratio, memory_ratios, time_ratios
from launch.planning.prediction.constants import Constants, fitted, left_out
from launch.planning.prediction.rank_memory import fullest
from modeling import cost


@dataclass(frozen=True)
class Errors:
    """Relative errors of a quantity over some rows; medians and worst are of their absolute values.

    Attributes:
        bias: the median of predicted / published.
    """

    rows: int
    median: float
    worst: float
    bias: float
    worst_row: str

    @classmethod
    def of(cls, ratios: Sequence[Ratio]) -> Errors | None:
        """None without rows."""
        if not ratios:
            return None
        sizes = [abs(ratio.error) for ratio in ratios]
        worst = max(ratios, key=lambda ratio: abs(ratio.error))
        bias = statistics.median(ratio.predicted / ratio.published for ratio in ratios)
        return cls(len(ratios), statistics.median(sizes), max(sizes), bias, worst.case.name)


@dataclass(frozen=True)
class Judged:
    """A row whose source tells whether its memory sufficed. `share`: predicted need over the GPU's memory."""

    case: Case
    share: float

    @property
    def predicted_oom(self) -> bool:
        return self.share > 1

    @property
    def right(self) -> bool:
        return self.predicted_oom == self.case.oom


@dataclass(frozen=True)
class TableErrors:
    """A table, or a document that is one."""

    document: str
    table: str
    time: Errors | None
    memory: Errors | None
    parameters: tuple[int, int]  # to the unit as printed, of how many that print them
    verdicts: tuple[int, int]  # right, of how many


@dataclass(frozen=True)
class Validation:
    """Everything that `validate` found.

    Attributes:
        excluded: rows that are not compared, with the reason.
        unseen: documents that no constant was fitted on; the others were left out one at a time.
    """

    tables: list[TableErrors]
    time: list[Ratio]
    memory: list[Ratio]
    judged: list[Judged]
    excluded: list[tuple[Case, str]]
    unseen: list[str]

    def of_document(self, name: str, quantity: str) -> Errors | None:
        """Errors of one document's "time" or "memory"."""
        ratios: list[Ratio] = getattr(self, quantity)
        return Errors.of([ratio for ratio in ratios if ratio.case.document == name])

    @property
    def documents(self) -> list[str]:
        """Names in the order of the tables."""
        return list(dict.fromkeys(table.document for table in self.tables))


def validate(cases: Sequence[Case]) -> Validation:
    """Predict the rows of every document with the constants fitted without it."""
    known = left_out()

    def constants(case: Case) -> Constants:
        return known.get(case.document, fitted())

    def ratios(find: Callable[[Iterable[Case], Constants], list[Ratio]]) -> list[Ratio]:
        return [ratio for case in cases for ratio in find([case], constants(case))]

    time, memory = ratios(time_ratios), ratios(memory_ratios)
    judged = [
        Judged(case, fullest(work, node.gpu, constants(case)).total / node.gpu.memory_bytes)
        for case in cases
        if case.work and case.oom is not None and not case.leaves_out("memory")
        for work, node in [case.step]
    ]
    places = dict.fromkeys((case.document, case.table) for case in cases)
    tables = [_of_table(place, cases, time, memory, judged) for place in places]
    excluded = [(case, next(iter(case.excluded.values()))) for case in cases if case.excluded]
    unseen = sorted({case.document for case in cases} - known.keys())
    return Validation(tables, time, memory, judged, excluded, unseen)


def _of_table(
    place: tuple[str, str],
    cases: Sequence[Case],
    time: Sequence[Ratio],
    memory: Sequence[Ratio],
    judged: Sequence[Judged],
) -> TableErrors:
    def own(case: Case) -> bool:
        return (case.document, case.table) == place

    counted = [case for case in cases if own(case) and case.parameters and case.work]
    verdicts = [each.right for each in judged if own(each.case)]
    return TableErrors(
        *place,
        Errors.of([ratio for ratio in time if own(ratio.case)]),
        Errors.of([ratio for ratio in memory if own(ratio.case)]),
        (sum(counted_parameters(case) == case.parameters for case in counted), len(counted)),
        (sum(verdicts), len(verdicts)),
    )


def counted_parameters(case: Case) -> int:
    """Parameters summed over tensor ranks, as Megatron-LM prints them."""
    work = case.work
    assert work is not None
    tp = work.layout.tp
    return tp * cost.parameters_per_rank(work.model, work.positions, work.padded_vocab, tp)
