"""Recompute the published tables: a summary, errata, and disagreements that nothing explains.

python tools/check_tables.py
"""

from __future__ import annotations

import argparse
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends, terminal
from launch.console.text_table import table
from tools.tables.lines import LineCheck

if TYPE_CHECKING:
    from tools.tables.verification import VerificationReport

ABOUT = """\
Recompute every number of the published tables that can be recomputed:
parameters by building each model on the meta device at every rank, layouts
and batches, samples/s, TFLOPS, scaling and memory. Compare settings with
texts, papers and public scripts, sizes and speeds with logs. The evidence
stands in each table's file below its rows; each disagreement is an erratum
there, with its explanation."""
EXAMPLES = """\
examples:
  python tools/check_tables.py
      everything: a summary, the errata, and what nothing explains
  python tools/check_tables.py jeanzay_megatron_performance --verbose
      one table, every check of it

exit codes: 0 every disagreement is explained and no explanation is stale, 1
otherwise, 2 refused."""
MARKS = {"agrees": "ok", "not checkable": "open", "computed": ""}


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(ABOUT, EXAMPLES)
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help="only these published tables"
    )
    parser.add_argument("--verbose", action="store_true", help="list every check")
    return parser


def main(typed: Sequence[str] | None = None) -> int:
    """Verify, print the report, and return exit code 0 or 1. Raises ValueError for refusals."""
    args = build_parser().parse_args(typed)
    terminal.quiet_libraries()
    # models are built without memory: no GPU is looked for
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from tools.tables import verification

    report = verification.verify(args.tables)
    print(describe(report, verbose=args.verbose, width=terminal.columns()))
    return 0 if report.passed else 1


def describe(
    report: VerificationReport, *, verbose: bool = False, width: int | None = None
) -> str:
    """Describe the report in blocks, in lines of `width` columns."""
    blocks = [
        _summary(report, width),
        _every_check(report) if verbose else "",
        _errata(report),
        _not_checkable(report),
        _remarks(
            "Repeated measurements: how far one configuration's times lie apart",
            report.repeated,
        ),
        _remarks("Texts: what they get wrong, found by hand", report.texts),
        _unexplained(report),
        _verdict(report),
    ]
    return terminal.wrapped("\n\n".join(block for block in blocks if block), width)


def _summary(report: VerificationReport, width: int | None) -> str:
    """Tabulate the numbers of checks by table."""
    kinds = _numbers(report, ())
    lines = []
    for name, rows in {**report.rows, "all": sum(report.rows.values())}.items():
        own = [check for check in report.checks if name in ("all", check.table)]
        counts = (rows, *_numbers(report, own).values())
        lines.append([name, *(count or "." for count in counts)])
    return table(lines, ["table", "rows", *kinds], "lr" + "r" * len(kinds), width)


def _numbers(report: VerificationReport, checks: Sequence[LineCheck]) -> dict[str, int]:
    """Count the checks by kind; of cells and settings, those that agree."""
    number = Counter(check.status for check in checks)
    agree = [check for check in checks if check.status == "agrees"]
    recomputed = Counter(
        check.status for check in checks if not (check.transcribed or check.stated)
    )
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


def _every_check(report: VerificationReport) -> str:
    lines = ["Every check"]
    subject = ""
    explained = report.explanations
    for check in report.checks:
        if check.subject != subject:
            subject = check.subject
            lines += ["", subject]
        wrong = "erratum" if check in explained else "UNEXPLAINED"
        words = (("printed", check.printed), ("computed", check.computed))
        parts = ", ".join(f"{word} {text}" for word, text in words if text)
        how = f"  [{check.how}]" if check.how else ""
        lines.append(
            f"  {MARKS.get(check.status, wrong):<12}{check.quantity}: {parts}{how}"
        )
    return "\n".join(lines)


def _errata(report: VerificationReport) -> str:
    """List the errata, each with its disagreements, and their rows by table."""
    blocks = []
    for number, (erratum, checks) in enumerate(report.errata, 1):
        alike: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for check in checks:
            alike[check.difference][check.table].append(
                check.subject.removeprefix(f"{check.table}/")
            )
        lines = [_line(f"{number}. {erratum.text}", "")]
        for difference, tables in alike.items():
            lines.append(_line(difference, "   "))
            for name, rows in tables.items():
                lines.append(_line(f"{name}/ {', '.join(rows)}", "      "))
        blocks.append("\n".join(lines))
    return _section(
        "Errata: disagreements with the sources, each explained", "\n\n".join(blocks)
    )


def _not_checkable(report: VerificationReport) -> str:
    """List what cannot be checked by quantity and reason, with its rows or tables."""
    reasons: dict[tuple[str, str], list[LineCheck]] = defaultdict(list)
    for check in report.checks:
        if check.status == "not checkable":
            reasons[check.quantity, check.how].append(check)
    lines = []
    for (quantity, reason), checks in reasons.items():
        subjects = dict.fromkeys(check.subject for check in checks)
        tables = dict.fromkeys(check.table for check in checks)
        where = f"{len(subjects)} rows of {', '.join(tables)}"
        if len(subjects) <= 3:
            where = ", ".join(subjects)
        lines.append(_line(f"{quantity}: {reason} ({where})", "  "))
    return _section("Not checkable: and why", "\n".join(lines))


def _remarks(heading: str, remarks: Sequence[str]) -> str:
    return _section(heading, "\n".join(_line(remark, "  ") for remark in remarks))


def _unexplained(report: VerificationReport) -> str:
    wrong = [f"  {check.subject} {check.difference}" for check in report.unexplained]
    stale = [f"  {line}" for line in report.stale]
    mend = "Correct the recipe or this project's arithmetic, or explain it in the table's evidence: errata."
    none = "disagreements under evidence: errata are none any more"
    remove = "  Remove each, or write what is printed and computed now."
    blocks = []
    if wrong:
        lines = [f"!!! UNEXPLAINED: {len(wrong)}", *wrong, _line(mend, "  ")]
        blocks.append("\n".join(lines))
    if stale:
        lines = [f"!!! STALE: {len(stale)} {none}", *stale, remove]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _verdict(report: VerificationReport) -> str:
    number = _numbers(report, report.checks)
    errata = number["errata"]
    known = f"{errata} disagreements are errata"
    if errata == 1:
        known = "1 disagreement is an erratum"
    text = (
        f"{number['agree']} recomputed values agree, {number['settings']} settings are what texts and public "
        f"scripts say, {known}, {number['not checkable']} cannot be checked ({number['cells']} entries of "
        "the recipe files are consistent with their own printed lines, which proves no number)"
    )
    if report.passed:
        return f"{text}. Every disagreement is explained."
    return f"{text}, {number['UNEXPLAINED']} are UNEXPLAINED, {len(report.stale)} explanations are stale."


def _section(heading: str, text: str) -> str:
    return f"{heading}\n{'=' * len(heading)}\n{text}" if text else ""


def _line(text: str, indent: str) -> str:
    return f"{indent}{' '.join(text.split())}"


if __name__ == "__main__":
    ends.run(main)
