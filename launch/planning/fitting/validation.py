"""The planner's errors on published rows, predicted by constants fitted without their document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.planning.fitting.cases import QUANTITIES, Case
from launch.planning.fitting.fitting import Ratio, ratios
from launch.planning.prediction.constants import Constants, constants_without_each, fitted_constants
from launch.planning.prediction.rank_memory import fullest_rank
from modeling import cost

Share = tuple[int, int]  # how many, of how many


@dataclass(frozen=True)
class MemoryVerdict:
    """A row with a printed verdict on its memory. `share`: predicted least need over the GPU's memory."""

    case: Case
    share: float

    @property
    def predicted_oom(self) -> bool:
        return self.share > 1

    @property
    def right(self) -> bool:
        return self.predicted_oom == self.case.oom


@dataclass(frozen=True)
class Validation:
    """Predictions of some rows, and their printed numbers."""

    cases: Sequence[Case]
    time: Sequence[Ratio]
    memory: Sequence[Ratio]
    allocated: Sequence[Ratio]
    memory_verdicts: Sequence[MemoryVerdict]

    def part(self, document: str, table: str = "") -> Validation:
        """Return the rows of a document, or of one of its tables."""

        def own(case: Case) -> bool:
            return case.document == document and table in ("", case.table)

        return Validation(
            [case for case in self.cases if own(case)],
            [ratio for ratio in self.time if own(ratio.case)],
            [ratio for ratio in self.memory if own(ratio.case)],
            [ratio for ratio in self.allocated if own(ratio.case)],
            [each for each in self.memory_verdicts if own(each.case)],
        )

    @property
    def tables(self) -> dict[str, list[str]]:
        """The tables of each document, in the order of the rows."""
        places = dict.fromkeys((case.document, case.table) for case in self.cases)
        return {name: [table for document, table in places if document == name] for name, _ in places}

    @property
    def excluded(self) -> list[tuple[Case, str]]:
        """Rows left out of the comparison, with the reason."""
        return [(case, next(iter(case.excluded.values()))) for case in self.cases if case.excluded]

    @property
    def unfitted(self) -> list[str]:
        """Documents outside every fit; the others were left out one at a time."""
        return sorted({case.document for case in self.cases} - constants_without_each().keys())

    @property
    def parameters(self) -> Share:
        """Rows with printed parameters: those predicted to the unit, and all of them."""
        counted = [case for case in self.cases if case.parameters and case.work]
        return sum(counted_parameters(case) == case.parameters for case in counted), len(counted)

    @property
    def right_verdicts(self) -> Share:
        """Verdicts on memory: the right ones, and all of them."""
        return sum(each.right for each in self.memory_verdicts), len(self.memory_verdicts)


def validate(cases: Sequence[Case]) -> Validation:
    """Predict the rows of every document with the constants fitted without it."""
    known = constants_without_each()

    def constants(case: Case) -> Constants:
        return known.get(case.document, fitted_constants())

    time, memory, allocated = (
        [ratio for case in cases for ratio in ratios(quantity, [case], constants(case))]
        for quantity in QUANTITIES
    )
    memory_verdicts = [
        MemoryVerdict(case, fullest_rank(work, node.gpu, constants(case)).least / node.gpu.memory_bytes)
        for case in cases
        if case.oom is not None and case.compares("memory")
        for work, node in [case.step]
    ]
    return Validation(cases, time, memory, allocated, memory_verdicts)


def counted_parameters(case: Case) -> int:
    """Count the parameters as Megatron-LM prints them, summed over tensor ranks."""
    work, _ = case.step
    tp = work.layout.tp
    return tp * cost.parameters_per_rank(work.model, work.positions, work.padded_vocab, tp)
