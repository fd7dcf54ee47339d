"""`launch/recipe.py verify`: recompute the published tables and list every disagreement with them."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.durable_files import write_atomically
from launch.console import arguments, quiet, terminal
from launch.console.output import new_file
from launch.tables.verifying.rows import Check, Row
from recipes.problems import Problem, ProblemsError

if TYPE_CHECKING:
    from launch.tables.verifying.verification import Report

ABOUT = """\
Recompute every number of the published tables that can be recomputed: parameters by building each model on
the meta device at every rank, layouts and batches, samples/s, TFLOPS, scaling and memory. Compare settings
with texts, papers and public scripts, sizes and speeds with logs. The evidence stands in each table's file
below its rows; each disagreement is an erratum there, with its explanation."""
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


def add_parser(commands: Any) -> None:
    """Add the subcommand `verify` to the subparsers of launch/recipe.py."""
    parser = commands.add_parser(
        "verify", help="recompute the published tables and list every disagreement", description=ABOUT,
        epilog=EXAMPLES, formatter_class=arguments.Help, allow_abbrev=False,
    )  # fmt: skip
    table = dict(nargs="+", action="extend", default=[], metavar="NAME")
    parser.add_argument("--table", **table, help="only these published tables")
    parser.add_argument("--verbose", action="store_true", help="list every check")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all checks and errata as JSON")
    parser.add_argument("--csv", metavar="FILE", type=Path, help="write all checks as CSV, one a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 or 1. Raises ValueError for what is refused."""
    quiet.quiet_libraries()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # models are built without memory: no GPU is looked for
    _check_outputs(args)
    from launch.tables.verifying import report_text, verification

    report = verification.verify(args.table, progress=_progress)
    print(report_text.describe(report, verbose=args.verbose, width=terminal.columns()))
    for flag, (text, _) in FORMS.items():
        if path := getattr(args, flag):
            write_atomically(path, text(report))
            print(f"wrote {path}")
    return 0 if report.passed else 1


def _check_outputs(args: argparse.Namespace) -> None:
    """Before minutes are spent: somewhere to write to, where nothing is but what this command wrote."""
    if args.json and args.csv and os.path.realpath(args.json) == os.path.realpath(args.csv):
        came = f"--json and --csv are both {args.json}"
        raise ProblemsError([Problem("--csv", came, "each writes a file", "name two files")])
    for flag, (_, beginning) in FORMS.items():
        if path := getattr(args, flag):
            new_file(f"--{flag}", path, own=beginning.encode())


def _progress(rows: Sequence[Row]) -> Iterator[Row]:
    """A bar on a terminal while models are built; nothing in a log."""
    from tqdm import tqdm

    bar = tqdm(rows, file=sys.stderr, unit="row", disable=None, leave=False, dynamic_ncols=True)
    for row in bar:
        bar.set_description_str(row.full_name)
        yield row


def _as_json(report: Report) -> str:
    def plain(checks: Sequence[Check]) -> list[dict[str, Any]]:
        return [asdict(check) for check in checks]

    values = {
        "written_by": WRITTEN_BY,
        "passed": report.passed,
        "checks": plain(report.checks),
        "errata": [
            {"explanation": each.explanation, "later": each.later, "disagreements": plain(checks)}
            for each, checks in report.errata
        ],
        "unexplained": plain(report.unexplained),
        "stale_explanations": report.stale,
        "remarks": report.repeated,
        "texts": report.texts,
    }
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


def _as_csv(report: Report) -> str:
    """RFC 4180 with a heading."""
    texts, buffer = {check: erratum.text for check, erratum in report.explanations.items()}, io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS)
    writer.writeheader()
    writer.writerows({**asdict(check), "explanation": texts.get(check, "")} for check in report.checks)
    return buffer.getvalue()


# By their flags: the text, and the first characters of every such file, by which one is known.
FORMS: dict[str, tuple[Callable[[Report], str], str]] = {
    "json": (_as_json, f'{{\n "written_by": "{WRITTEN_BY}"'),
    "csv": (_as_csv, ",".join(COLUMNS) + "\r\n"),
}
