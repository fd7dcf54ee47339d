"""Text of `launch/recipe.py verify`: a summary, errata, and unexplained disagreements."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from launch.console.terminal import wrapped
from launch.console.text_table import table
from launch.tables.rows import Check
from launch.tables.verification import Report

MARKS = {"agrees": "ok", "not checkable": "open", "computed": ""}


def describe(report: Report, *, verbose: bool = False, width: int | None = None) -> str:
    """Describe the report in blocks, in lines of `width` columns."""
    blocks = [
        _summary(report, width),
        _every_check(report) if verbose else "",
        _errata(report),
        _not_checkable(report),
        _remarks("Repeated measurements: how far one configuration's times lie apart", report.repeated),
        _remarks("Texts: what they get wrong, found by hand", report.texts),
        _unexplained(report),
        _verdict(report),
    ]
    return wrapped("\n\n".join(block for block in blocks if block), width)


def _summary(report: Report, width: int | None) -> str:
    """Tabulate the numbers of checks by table."""
    by_table: dict[str, list[Check]] = {name: [] for name in report.rows}
    for check in report.checks:
        by_table[check.table].append(check)
    lines = [[name, count, *_numbers(report, by_table[name]).values()] for name, count in report.rows.items()]
    numbers = _numbers(report, report.checks)
    lines.append(["all", sum(report.rows.values()), *numbers.values()])
    shown = [["." if cell == 0 else str(cell) for cell in line] for line in lines]
    return table(shown, ["table", "rows", *numbers], "lr" + "r" * len(numbers), width)


def _numbers(report: Report, checks: Sequence[Check]) -> dict[str, int]:
    """Count the checks by kind; of cells and settings, those that agree."""
    number = Counter(check.status for check in checks)
    agree = [check for check in checks if check.status == "agrees"]
    recomputed = Counter(check.status for check in checks if not (check.transcribed or check.stated))
    errata = len(report.explanations.keys() & set(checks))
    return {
        "cells": sum(check.transcribed for check in agree),
        "settings": sum(check.stated for check in agree),
        "recomputed": recomputed["agrees"] + recomputed["disagrees"],
        "agree": recomputed["agrees"],
        "errata": errata,
        "UNEXPLAINED": number["disagrees"] - errata,
        "not checkable": number["not checkable"],
        "for information": number["computed"],
    }


def _every_check(report: Report) -> str:
    lines, subject, explained = ["Every check"], "", report.explanations
    for check in report.checks:
        if check.subject != subject:
            subject = check.subject
            lines += ["", subject]
        wrong = "erratum" if check in explained else "UNEXPLAINED"
        words = (("printed", check.printed), ("computed", check.computed))
        parts = ", ".join(f"{word} {text}" for word, text in words if text)
        how = f"  [{check.how}]" if check.how else ""
        lines.append(f"  {MARKS.get(check.status, wrong):<12}{check.quantity}: {parts}{how}")
    return "\n".join(lines)


def _errata(report: Report) -> str:
    """List the errata, each with its disagreements, and their rows by table."""
    blocks = []
    for number, (erratum, checks) in enumerate(report.errata, 1):
        alike: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for check in checks:
            alike[check.difference][check.table].append(check.subject.removeprefix(f"{check.table}/"))
        lines = [_line(f"{number}. {erratum.text}", "")]
        for difference, tables in alike.items():
            lines.append(_line(difference, "   "))
            lines += [_line(f"{table}/ {', '.join(rows)}", "      ") for table, rows in tables.items()]
        blocks.append("\n".join(lines))
    return _section("Errata: disagreements with the sources, each explained", "\n\n".join(blocks))


def _not_checkable(report: Report) -> str:
    """List what cannot be checked by quantity and reason, with its rows or tables."""
    reasons: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in report.checks:
        if check.status == "not checkable":
            reasons[check.quantity, check.how].append(check)
    lines = []
    for (quantity, reason), checks in reasons.items():
        subjects, tables = ({getattr(each, key): 0 for each in checks} for key in ("subject", "table"))
        where = ", ".join(subjects) if len(subjects) <= 3 else f"{len(subjects)} rows of {', '.join(tables)}"
        lines.append(_line(f"{quantity}: {reason} ({where})", "  "))
    return _section("Not checkable: and why", "\n".join(lines))


def _remarks(heading: str, remarks: Sequence[str]) -> str:
    return _section(heading, "\n".join(_line(remark, "  ") for remark in remarks))


def _unexplained(report: Report) -> str:
    wrong = [f"  {check.subject} {check.difference}" for check in report.unexplained]
    stale = [f"  {line}" for line in report.stale]
    mend = "Correct the recipe or this project's arithmetic, or explain it in the table's evidence: errata."
    none = "disagreements under evidence: errata are none any more"
    remove = "  Remove each, or write what is printed and computed now."
    blocks = [[f"!!! UNEXPLAINED: {len(wrong)}", *wrong, _line(mend, "  ")]] if wrong else []
    blocks += [[f"!!! STALE: {len(stale)} {none}", *stale, remove]] if stale else []
    return "\n\n".join("\n".join(block) for block in blocks)


def _verdict(report: Report) -> str:
    number = _numbers(report, report.checks)
    errata = number["errata"]
    found = "1 disagreement is an erratum" if errata == 1 else f"{errata} disagreements are errata"
    text = (
        f"{number['agree']} recomputed values agree, {number['settings']} settings are what texts and public "
        f"scripts say, {found}, {number['not checkable']} cannot be checked ({number['cells']} entries of "
        "the recipe files are consistent with their own printed lines, which proves no number)"
    )
    if report.passed:
        return f"{text}. Every disagreement is explained."
    return f"{text}, {number['UNEXPLAINED']} are UNEXPLAINED, {len(report.stale)} explanations are stale."


def _section(heading: str, text: str) -> str:
    return f"{heading}\n{'=' * len(heading)}\n{text}" if text else ""


def _line(text: str, indent: str) -> str:
    return f"{indent}{' '.join(text.split())}"
