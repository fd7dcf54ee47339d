"""A report of `recipes.py verify` as a person reads it: a summary, the errata, and last what nothing explains."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from launch.tables.verifying.check import Check

if TYPE_CHECKING:
    from launch.tables.verifying.verification import Report

WIDTH = 118
KINDS = ("transcribed", "stated", "recomputed")


def describe(report: Report, *, verbose: bool = False) -> str:
    """Blocks of text, an empty line between them."""
    blocks = [_summary(report)]
    if verbose:
        blocks.append(_every_check(report))
    blocks += [
        _errata(report),
        _not_checkable(report),
        _remarks(report),
        _unexplained(report),
        _verdict(report),
    ]
    return "\n\n".join(block for block in blocks if block)


def _summary(report: Report) -> str:
    """Per table: its rows; entries that repeat the printed line rightly; settings as texts have them; what was recomputed, and its end."""
    headings = (
        "table",
        "rows",
        "cells",
        "settings",
        "recomputed",
        "agree",
        "errata",
        "UNEXPLAINED",
        "not checkable",
        "for information",
    )
    number = Counter((check.table, _kind(check), status) for check, status in report.statuses.items())
    lines: list[tuple[str, ...]] = []
    for table, rows in report.rows.items():
        agree = {kind: number[table, kind, "agrees"] for kind in KINDS}
        errata, wrong, left = (
            sum(number[table, kind, s] for kind in KINDS) for s in ("erratum", "UNEXPLAINED", "not checkable")
        )
        recomputed = sum(number[table, "recomputed", s] for s in ("agrees", "erratum", "UNEXPLAINED"))
        information = number[table, "recomputed", "computed"]
        values = (
            rows,
            *(agree[kind] for kind in KINDS[:2]),
            recomputed,
            agree["recomputed"],
            errata,
            wrong,
            left,
            information,
        )
        lines.append((table, *map(str, values)))
    totals = [str(sum(int(line[column]) for line in lines)) for column in range(1, len(headings))]
    return _columns([headings, *lines, ("all", *totals)])


def _kind(check: Check) -> str:
    return "transcribed" if check.transcribed else "stated" if check.stated else "recomputed"


def _columns(lines: list[tuple[str, ...]]) -> str:
    """The first column to the left, numbers to the right, zeros as a dot."""
    shown = [(line[0], *("." if cell == "0" else cell for cell in line[1:])) for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    aligned = [
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in shown
    ]
    rule = "-" * len(aligned[0])
    return "\n".join([aligned[0], rule, *aligned[1:-1], rule, aligned[-1]])


def _every_check(report: Report) -> str:
    marks = {"agrees": "ok", "not checkable": "open", "computed": ""}
    lines, subject = ["Every check"], ""
    for check, status in report.statuses.items():
        if check.subject != subject:
            subject = check.subject
            lines += ["", subject]
        parts = [
            f"{word} {text}"
            for word, text in (("printed", check.printed), ("computed", check.computed))
            if text
        ]
        how = f"  [{check.how}]" if check.how else ""
        lines.append(f"  {marks.get(status, status):<12}{check.quantity}: {', '.join(parts)}{how}")
    return "\n".join(lines)


def _errata(report: Report) -> str:
    if not report.sorted.explained:
        return ""
    blocks = [
        _wrapped(f"{number}. {erratum.text}", "") + "\n" + _disagreements(checks)
        for number, (erratum, checks) in enumerate(report.sorted.explained, 1)
    ]
    return _heading("Errata", "disagreements with the sources, each explained") + "\n\n".join(blocks)


def _disagreements(checks: tuple[Check, ...]) -> str:
    """What differs, and below it the rows that differ so, table by table."""
    alike: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for check in checks:
        what = check.line.removeprefix(f"{check.subject} ")
        alike[what][check.table].append(check.subject.removeprefix(f"{check.table}/"))
    lines = []
    for what, tables in alike.items():
        lines.append(_wrapped(what, "   "))
        lines += [_wrapped(f"{table}/ {', '.join(rows)}", "      ") for table, rows in tables.items()]
    return "\n".join(lines)


def _not_checkable(report: Report) -> str:
    """By reason: how many, of which quantities, in which tables."""
    reasons: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in report.checks:
        if check.status == "not checkable":
            reasons[(check.quantity.split(' "')[0], check.how)].append(check)
    if not reasons:
        return ""
    lines = []
    for (quantity, reason), checks in reasons.items():
        subjects = list(dict.fromkeys(check.subject for check in checks))
        tables = list(dict.fromkeys(check.table for check in checks))
        where = ", ".join(subjects) if len(subjects) <= 3 else f"{len(subjects)} rows of {', '.join(tables)}"
        lines.append(_wrapped(f"{quantity}: {reason} ({where})", "  "))
    return _heading("Not checkable", "and why") + "\n".join(lines)


def _remarks(report: Report) -> str:
    if not report.remarks:
        return ""
    return _heading("Repeated measurements", "how far one configuration's times lie apart") + "\n".join(
        _wrapped(remark, "  ") for remark in report.remarks
    )


def _unexplained(report: Report) -> str:
    blocks = []
    if report.sorted.unexplained:
        lines = "\n".join(f"  {check.line}" for check in report.sorted.unexplained)
        blocks.append(f"!!! UNEXPLAINED: {len(report.sorted.unexplained)}\n{lines}\n" + _wrapped(
            "Correct the recipe or this project's arithmetic, or explain the line in recipes/checks/errata.yaml.", "  "
        ))  # fmt: skip
    if report.sorted.stale:
        lines = "\n".join(f"  {line}" for line in report.sorted.stale)
        blocks.append(f"!!! STALE: {len(report.sorted.stale)} lines of recipes/checks/errata.yaml explain nothing any more\n{lines}\n"
                      "  Remove each, or write what is printed and computed now.")  # fmt: skip
    return "\n\n".join(blocks)


def _verdict(report: Report) -> str:
    number = Counter((_kind(check), status) for check, status in report.statuses.items())
    cells, settings, agree = (number[kind, "agrees"] for kind in KINDS)
    errata, left = (sum(number[kind, status] for kind in KINDS) for status in ("erratum", "not checkable"))
    found = "1 disagreement is an erratum" if errata == 1 else f"{errata} disagreements are errata"
    text = (
        f"{agree} recomputed values agree, {settings} settings are what texts and public scripts say, {found}, {left} cannot be checked "
        f"({cells} entries of the recipe files are consistent with their own printed lines, which proves no number)"
    )
    if report.passed:
        return f"{text}. Every disagreement is explained."
    return f"{text}, {len(report.sorted.unexplained)} are UNEXPLAINED, {len(report.sorted.stale)} explanations are stale."


def _heading(title: str, about: str) -> str:
    return f"{title}: {about}\n{'=' * (len(title) + len(about) + 2)}\n"


def _wrapped(text: str, indent: str = "    ") -> str:
    # A row's name is one word: breaking it at its hyphens would hide it from a search.
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )
