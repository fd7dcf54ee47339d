"""Text of `validate`: errors by table, wrong verdicts, and rows left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from launch.console.terminal import wrapped
from launch.console.text_table import table
from launch.planning.fitting.fitting import Ratio, error_of
from launch.planning.fitting.validation import Share, Validation
from launch.planning.prediction.hardware import GIB

HEADINGS = ("table", "parameters", "memory verdicts", "cached memory", "time per iteration")
ABOUT = (
    "Each document is predicted by constants fitted without it. Errors: median, 90th percentile, worst "
    "(rows); x 0.9 is the median of predicted over published."
)


def describe(found: Validation, *, verbose: bool = False, width: int | None = None) -> str:
    """Describe errors, verdicts and left-out rows; `verbose`: also every row."""
    lines = []
    for document, tables in found.tables.items():
        lines.append([shortened(document), *_cells(found.part(document))])
        if len(tables) > 1:
            lines += [[f"- {name}", *_cells(found.part(document, name))] for name in tables]
    lines.append(["all rows", "", "", _errors(found.memory), _errors(found.time)])
    count = Counter((each.case.oom, each.predicted_oom) for each in found.memory_verdicts)
    verdicts = [
        (name, count[oom, True], count[oom, False]) for name, oom in (("printed OOM", True), ("ran", False))
    ]
    matrix = table(verdicts, ("memory verdicts", "predicted OOM", "predicted to fit"), "lrr")
    sections = [wrapped(ABOUT, width), table(lines, HEADINGS, width=width)]
    if found.allocated:
        sections.append(f"allocated memory, of rows that print it too: {_errors(found.allocated)}")
    sections.append(matrix)
    wrong = [
        f"  {each.case.document}, {each.case.name}: printed {'OOM' if each.case.oom else 'ran'}, "
        f"predicted {each.share:.0%} of the memory"
        for each in found.memory_verdicts
        if not each.right
    ]
    sections.append("\n".join(["verdicts that are wrong:", *wrong]) if wrong else "no verdict is wrong")
    excluded = [wrapped(f"  {case.table}/{case.name}: {why}", width, hang=4) for case, why in found.excluded]
    if excluded:
        sections.append("\n".join(["shown, and not compared:", *excluded]))
    if found.unfitted:
        sections.append(wrapped(f"no constant was fitted on: {', '.join(found.unfitted)}", width))
    if verbose and found.time:
        sections.append(_rows("seconds per iteration", found.time, 1.0, width))
    if verbose and found.memory:
        sections.append(_rows("cached memory, GiB", found.memory, GIB, width))
    if verbose and found.allocated:
        sections.append(_rows("allocated memory, GiB", found.allocated, GIB, width))
    return "\n\n".join(sections)


def shortened(name: str, most: int = 43) -> str:
    """Shorten a document's name to `most` characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _cells(found: Validation) -> list[str]:
    return [_of(found.parameters), _of(found.right_verdicts), _errors(found.memory), _errors(found.time)]


def _of(share: Share) -> str:
    return f"{share[0]} of {share[1]}" if share[1] else ""


def _errors(ratios: Sequence[Ratio]) -> str:
    if not (found := error_of(ratios)):
        return ""
    return (
        f"{found.median:.1%}, {found.percentile_90:.0%}, {found.worst:.0%} ({found.rows}) x {found.bias:.2f}"
    )


def _rows(title: str, ratios: Sequence[Ratio], unit: float, width: int | None) -> str:
    lines = []
    for ratio in ratios:
        ours, theirs = ratio.predicted / unit, ratio.published / unit
        numbers = f"{ours:.4g}", f"{theirs:.4g}", f"{ours / theirs:.2f}"
        lines.append([ratio.case.document, ratio.case.name, *numbers])
    headings = ["document", "row", "predicted", "published", "ratio"]
    return f"{title}\n{table(lines, headings, 'llrrr', width)}"
