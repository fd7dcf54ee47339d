"""What `validate` found, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launch.console.terminal import wrapped
from launch.console.text_table import table
from launch.planning.fitting.fitting import Ratio
from launch.planning.fitting.validation import Errors, TableErrors, Validation

HEADINGS = ("table", "parameters", "memory verdicts", "cached memory", "time per iteration")
ABOUT = (
    "Each document is predicted by constants fitted without it. Errors: median, worst (rows); x 0.9 is the "
    "median of predicted over published."
)


def describe(found: Validation, *, verbose: bool = False, width: int | None = None) -> str:
    """The table, the confusion matrix, what is wrong, what is left out; every row where `verbose`."""
    lines = []
    for document in found.documents:
        own = [each for each in found.tables if each.document == document]
        lines.append((_short(document), *_summary(own, found, document)))
        if len(own) > 1:
            lines += [(f"- {each.table}", *_cells(each)) for each in own]
    whole = ("all rows", "", "", _errors(Errors.of(found.memory)), _errors(Errors.of(found.time)))
    sections = [wrapped(ABOUT, width), table([*lines, whole], HEADINGS, width=width), _matrix(found)]
    wrong = [
        f"  {each.case.document}, {each.case.name}: printed {'OOM' if each.case.oom else 'ran'}, "
        f"predicted {each.share:.0%} of the memory"
        for each in found.judged
        if not each.right
    ]
    sections.append("\n".join(["verdicts that are wrong:", *wrong]) if wrong else "no verdict is wrong")
    excluded = [f"  {case.table}/{case.name}: {why}" for case, why in found.excluded]
    if excluded:
        sections.append(
            "\n".join(["shown, and not compared:", *(wrapped(line, width, hang=4) for line in excluded)])
        )
    if found.unseen:
        sections.append(wrapped(f"no constant was fitted on: {', '.join(found.unseen)}", width))
    if verbose:
        sections.append(_rows(found, width))
    return "\n\n".join(sections)


def _short(name: str, most: int = 43) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _summary(own: list[TableErrors], found: Validation, document: str) -> tuple[str, str, str, str]:
    """A document's cells; those of its only table, where it has one."""
    exact, counted = (sum(each.parameters[i] for each in own) for i in (0, 1))
    right, judged = (sum(each.verdicts[i] for each in own) for i in (0, 1))
    memory, time = (found.of_document(document, quantity) for quantity in ("memory", "time"))
    return _of(exact, counted), _of(right, judged), _errors(memory), _errors(time)


def _cells(each: TableErrors) -> tuple[str, str, str, str]:
    return _of(*each.parameters), _of(*each.verdicts), _errors(each.memory), _errors(each.time)


def _of(some: int, all_: int) -> str:
    return f"{some} of {all_}" if all_ else ""


def _errors(errors: Errors | None) -> str:
    if errors is None:
        return ""
    return f"{errors.median:.1%}, {errors.worst:.0%} ({errors.rows}) x {errors.bias:.2f}"


def _matrix(found: Validation) -> str:
    """Out of memory: printed against predicted."""
    count = {
        (printed, predicted): sum(
            each.case.oom == printed and each.predicted_oom == predicted for each in found.judged
        )
        for printed in (True, False)
        for predicted in (True, False)
    }
    rows = [
        ("printed OOM", count[True, True], count[True, False]),
        ("ran", count[False, True], count[False, False]),
    ]
    return table(rows, ("memory verdicts", "predicted OOM", "predicted to fit"), "lrr")


def _rows(found: Validation, width: int | None) -> str:
    def line(ratio: Ratio, unit: float) -> list[str]:
        ours, theirs = ratio.predicted / unit, ratio.published / unit
        return [ratio.case.document, ratio.case.name, f"{ours:.4g}", f"{theirs:.4g}", f"{ours / theirs:.2f}"]

    headings = ["document", "row", "predicted", "published", "ratio"]
    return "\n\n".join(
        f"{title}\n{table([line(ratio, unit) for ratio in ratios], headings, 'llrrr', width)}"
        for title, ratios, unit in (
            ("seconds per iteration", found.time, 1.0),
            ("cached memory, GiB", found.memory, 2.0**30),
        )
        if ratios
    )


def as_json(found: Validation) -> dict[str, Any]:
    """Every number."""

    def row(ratio: Ratio) -> dict[str, Any]:
        case = ratio.case
        return {
            "document": case.document, "table": case.table, "row": case.name, "predicted": ratio.predicted,
            "published": ratio.published,
        }  # fmt: skip

    return {
        "tables": [asdict(each) for each in found.tables],
        "seconds": [row(ratio) for ratio in found.time],
        "cached_bytes": [row(ratio) for ratio in found.memory],
        "verdicts": [
            {"document": each.case.document, "row": each.case.name, "oom": each.case.oom, "share": each.share}
            for each in found.judged
        ],
        "excluded": [
            {"document": case.document, "row": case.name, "why": why} for case, why in found.excluded
        ],
    }
