"""Recompute the published tables and list every disagreement with them.

python launch/recipe.py verify
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.durable_files import write_atomically
from launch.console import quiet
from launch.tables.verifying.check import Check

if TYPE_CHECKING:
    from launch.tables.verifying.rows import Row
    from launch.tables.verifying.verification import Report

ABOUT = """\
Recompute every number of the published tables that can be recomputed: parameters by building each model on the meta device at
every rank, layouts and batches, samples/s, TFLOPS, scaling, memory, and what the documents say in their text. Compare settings with
texts, papers and public scripts (recipes/checks/settings.yaml), and each printed line with its digest of when it was last compared with
the document. Each disagreement is an erratum with its explanation (recipes/checks/errata.yaml)."""
EXAMPLES = """\
examples:
  python launch/recipe.py verify
      everything: a summary, the errata, and what nothing explains
  python launch/recipe.py verify --table jeanzay_megatron_performance --verbose
      one table, every check of it
  python launch/recipe.py verify --json verify.json --csv verify.csv
      every check, for a program and for a spreadsheet

A file that an earlier verify wrote is replaced, any other is not.
exit codes: 0 every disagreement is explained and no explanation is stale, 1 otherwise, 2 refused."""
WRITTEN_BY = "launch/recipe.py verify"
COLUMNS = (*(field.name for field in fields(Check)), "explanation")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The subcommand `verify` of launch/recipe.py."""
    parser = subparsers.add_parser(
        "verify", help="recompute the published tables and list every disagreement", description=ABOUT, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--table", nargs="+", action="extend", default=[], metavar="NAME", help="only these published tables, or groups of "
                        "claims")  # fmt: skip
    parser.add_argument("--verbose", action="store_true", help="list every check")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write all checks, errata and remarks as JSON"
    )
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write all checks as CSV, one a line")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Exit code 0, 1 or 2."""
    quiet.quiet_libraries()
    os.environ.setdefault(
        "DS_ACCELERATOR", "cpu"
    )  # modules are built without memory: no GPU is looked for, none is missed
    from launch.tables.verifying import report_text, verification

    try:
        _check_outputs(args)
        report = verification.verify(args.table, progress=_progress)
    except ValueError as error:
        print(f"\n{error}\n", file=sys.stderr)
        return 2
    print(report_text.describe(report, verbose=args.verbose))
    for flag, form in FORMS.items():
        if path := getattr(args, flag):
            write_atomically(path, form.text(report))
            print(f"wrote {path}")
    return 0 if report.passed else 1


def _check_outputs(args: argparse.Namespace) -> None:
    """Before minutes are spent: somewhere to write to, where nothing is but what this command wrote."""
    if args.json and args.csv and args.json.resolve() == args.csv.resolve():
        raise ValueError(f"--json and --csv are both {args.json}: name two files")
    for flag, form in FORMS.items():
        path = getattr(args, flag)
        if path and (path.is_dir() or not path.parent.is_dir()):
            problem = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
            raise ValueError(f"--{flag} {path}: {problem}: name a file in a directory that exists")
        if path and path.exists() and not _begins_with(path, form.beginning):
            raise ValueError(
                f"--{flag} {path} is a file that this command did not write as {flag.upper()}, and it replaces only its own: name another "
                f"file with --{flag}, or move this one"
            )


def _begins_with(path: Path, text: str) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read(len(text)) == text
    except (OSError, UnicodeDecodeError):
        return False


def _progress(rows: Sequence[Row]) -> Iterator[Row]:
    """A bar on a terminal while models are built; nothing in a log."""
    from tqdm import tqdm

    bar = tqdm(rows, file=sys.stderr, unit="row", disable=None, leave=False, dynamic_ncols=True)
    for row in bar:
        bar.set_description_str(row.full_name)
        yield row


def _as_json(report: Report) -> str:
    errata = [
        {
            "explanation": erratum.explanation,
            "later": erratum.later,
            "disagreements": [check.values() for check in checks],
        }
        for erratum, checks in report.sorted.explained
    ]
    values = {
        "written_by": WRITTEN_BY,
        "passed": report.passed,
        "checks": [check.values() for check in report.checks],
        "errata": errata,
        "unexplained": [check.values() for check in report.sorted.unexplained],
        "stale_explanations": list(report.sorted.stale),
        "remarks": list(report.remarks),
    }
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def _as_csv(report: Report) -> str:
    """RFC 4180 with a heading."""
    explained = {check: erratum.text for erratum, checks in report.sorted.explained for check in checks}
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS)
    writer.writeheader()
    for check in report.checks:
        writer.writerow({**check.values(), "explanation": explained.get(check, "")})
    return buffer.getvalue()


@dataclass(frozen=True)
class Form:
    """`beginning`: of every file of this form, by which one is known."""

    text: Callable[[Report], str]
    beginning: str


FORMS = {
    "json": Form(_as_json, f'{{\n "written_by": "{WRITTEN_BY}"'),
    "csv": Form(_as_csv, ",".join(COLUMNS) + "\r\n"),
}  # by their flags
