"""The planner's errors on published rows, predicted by constants fitted without their document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launch.console.terminal import wrapped
from launch.console.text_table import table
from launch.planning.prediction.constants import Constants, Error, fitted
from launch.planning.prediction.forecast_text import ROWS_OF
from launch.planning.prediction.hardware import GIB
from launch.planning.prediction.rank_memory import fullest_rank
from launch.planning.prediction.step_time import WAITING, step_time
from tools.planner.cases import QUANTITIES, Case, by_document
from tools.planner.fitting import ERRED, Ratio, by_kind, error_of, ratios

KINDS = ("a plan's error", "rows", "")
HEADINGS = ("table", "memory verdicts", "cached memory", "time per iteration")
ABOUT = (
    "Each document is predicted by constants fitted without it. Errors: median, 90th percentile, worst "
    "(rows); x 0.9 is the median of predicted over published."
)
ROWS = {  # quantity -> title and unit of its rows
    "time": ("seconds per iteration", 1.0),
    "memory": ("cached memory, GiB", GIB),
    "allocated": ("allocated memory, GiB", GIB),
}


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
class PlannerValidation:
    """Predictions of some rows, and their printed numbers by quantity of `QUANTITIES`."""

    cases: Sequence[Case]
    ratios: Mapping[str, Sequence[Ratio]]
    verdicts: Sequence[MemoryVerdict]

    @property
    def excluded(self) -> list[tuple[Case, str]]:
        """Rows left out of the comparison, with the reason."""
        left = (case for case in self.cases if case.excluded)
        return [(case, next(iter(case.excluded.values()))) for case in left]

    @property
    def unfitted(self) -> list[str]:
        """Documents outside every fit; the others were left out one at a time."""
        return sorted({case.document for case in self.cases} - fitted().left_out.keys())


def validate(cases: Sequence[Case]) -> PlannerValidation:
    """Predict the rows of every document with the constants fitted without it."""
    compared: dict[str, list[Ratio]] = {name: [] for name in QUANTITIES}
    verdicts = []
    for case in cases:
        for name in QUANTITIES:
            compared[name] += ratios(name, [case], unseeing(case))
        if case.oom is not None and case.compares("memory"):
            work, node = case.step
            needed = fullest_rank(work, node.gpu, unseeing(case)).least
            verdicts.append(MemoryVerdict(case, needed / node.gpu.memory_bytes))
    return PlannerValidation(cases, compared, verdicts)


def unseeing(case: Case) -> Constants:
    """Return the constants fitted without the case's document."""
    return fitted().left_out.get(case.document, fitted().constants)


def waits(case: Case) -> bool:
    """Check whether the GPU is predicted to wait for the host."""
    return step_time(*case.step, unseeing(case)).waits


def describe(
    validation: PlannerValidation, *, verbose: bool = False, width: int | None = None
) -> str:
    """Describe errors, verdicts and left-out rows; `verbose`: also every row."""
    lines = []
    for document, cases in by_document(validation.cases).items():
        lines.append([shortened(document), *_cells(cases)])
        tables = dict.fromkeys(case.table for case in cases)
        for name in tables if len(tables) > 1 else ():
            own = [case for case in cases if case.table == name]
            lines.append([f"- {name}", *_cells(own)])
    errors = {name: _errors(each) for name, each in validation.ratios.items()}
    lines.append(["all rows", "", errors["memory"], errors["time"]])
    sections = [wrapped(ABOUT, width), table(lines, HEADINGS, width=width)]
    sections.append(table(_kinds(validation), KINDS, width=width))
    if errors["allocated"]:
        sections.append(
            f"allocated memory, of rows that print it too: {errors['allocated']}"
        )
    small = _errors([ratio for ratio in validation.ratios["time"] if waits(ratio.case)])
    if small:
        told = fitted().waiting
        where = f"of rows in which the GPU waits for the host ({WAITING:.0%} or more)"
        sections.append(
            wrapped(
                f"time, {where}: {small}; "
                f"these too few: such predictions bear {told.median:.0%}, the median of {told.rows} other rows",
                width,
            )
        )
    sections += _verdicts(validation.verdicts)
    if validation.excluded:
        excluded = ["shown, and not compared:"]
        for case, why in validation.excluded:
            excluded.append(
                wrapped(f"  {case.table}/{case.name}: {why}", width, hang=4)
            )
        sections.append("\n".join(excluded))
    sections.append(wrapped(_systems(validation.cases), width))
    if validation.unfitted:
        unfitted = ", ".join(validation.unfitted)
        sections.append(wrapped(f"no constant was fitted on: {unfitted}", width))
    if verbose:
        sections += _verbose(validation, width)
    return "\n\n".join(sections)


def _kinds(validation: PlannerValidation) -> Iterator[tuple[str, str, str]]:
    """Yield the kinds of predictions, each with its rows and their errors."""
    for quantity in ERRED:
        kinds = by_kind(quantity, validation.ratios[quantity], fitted())
        for kind, error in kinds.items():
            yield kind, ROWS_OF[kind], _spread(error)


def _verbose(validation: PlannerValidation, width: int | None) -> Iterator[str]:
    """Yield tables of every row."""
    for name, (title, unit) in ROWS.items():
        if validation.ratios[name]:
            yield f"{title}\n{_rows(validation.ratios[name], unit, width)}"


def _systems(cases: Sequence[Case]) -> str:
    """Name the software as which rows are predicted."""
    rows = Counter(case.work.software.name for case in cases if case.work)
    names = (f"{name} ({number})" for name, number in sorted(rows.items()))
    return f"rows are predicted as this software runs them: {', '.join(names)}"


def shortened(name: str, most: int = 43) -> str:
    """Shorten a document's name to `most` characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _cells(cases: Sequence[Case]) -> list[str]:
    part = validate(cases)
    right = [each.right for each in part.verdicts]
    verdicts = f"{sum(right)} of {len(right)}" if right else ""
    return [verdicts, _errors(part.ratios["memory"]), _errors(part.ratios["time"])]


def _errors(compared: Sequence[Ratio]) -> str:
    return _spread(error_of(compared)) if compared else ""


def _spread(error: Error) -> str:
    spread = f"{error.median:.1%}, {error.percentile_90:.0%}, {error.worst:.0%}"
    return f"{spread} ({error.rows}) x {error.bias:.2f}"


def _verdicts(verdicts: Sequence[MemoryVerdict]) -> tuple[str, str]:
    """Count the verdicts in a table, and list the wrong ones."""
    count = Counter((each.case.oom, each.predicted_oom) for each in verdicts)
    rows = [
        ("printed OOM", count[True, True], count[True, False]),
        ("ran", count[False, True], count[False, False]),
    ]
    wrong = []
    for each in verdicts:
        if not each.right:
            printed = "OOM" if each.case.oom else "ran"
            wrong.append(
                f"  {each.case.document}, {each.case.name}: printed {printed}"
                f", predicted {each.share:.0%} of the memory"
            )
    head = "verdicts that are wrong:" if wrong else "no verdict is wrong"
    headings = ("memory verdicts", "predicted OOM", "predicted to fit")
    return table(rows, headings, "lrr"), "\n".join([head, *wrong])


def _rows(compared: Sequence[Ratio], unit: float, width: int | None) -> str:
    lines = []
    for ratio in compared:
        ours = ratio.predicted / unit
        theirs = ratio.published / unit
        case = ratio.case
        names = case.document, case.name, case.step[0].software.name
        numbers = f"{ours:.4g}", f"{theirs:.4g}", f"{ours / theirs:.2f}"
        lines.append([*names, *numbers])
    return table(
        lines,
        ["document", "row", "as run by", "predicted", "published", "ratio"],
        "lllrrr",
        width,
    )
