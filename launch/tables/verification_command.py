"""The subcommand `launch/recipe.py verify`: every disagreement with the published tables."""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from data.durable_files import write_atomically
from launch.console import arguments, quiet, terminal
from launch.console.new_output import new_file
from launch.tables.rows import Check, PublishedRow

if TYPE_CHECKING:
    from launch.tables.verification import Report

ABOUT = """\
Recompute every number of the published tables that can be recomputed:
parameters by building each model on the meta device at every rank, layouts
and batches, samples/s, TFLOPS, scaling and memory. Compare settings with
texts, papers and public scripts, sizes and speeds with logs. The evidence
stands in each table's file below its rows; each disagreement is an erratum
there, with its explanation."""
EXAMPLES = """\
examples:
  python launch/recipe.py verify
      everything: a summary, the errata, and what nothing explains
  python launch/recipe.py verify jeanzay_megatron_performance --verbose
      one table, every check of it
  python launch/recipe.py verify --csv verify.csv
      every check, for a program or a spreadsheet

A file that an earlier verify wrote is replaced, any other is not.
exit codes: 0 every disagreement is explained and no explanation is stale, 1
otherwise, 2 refused."""
COLUMNS = (*(field.name for field in fields(Check)), "explanation")


def add_parser(commands: Any) -> None:
    """Add the subcommand `verify` to the subparsers of launch/recipe.py."""
    line = "recompute the published tables and list every disagreement"
    parser = arguments.subcommand(commands, "verify", line, ABOUT, EXAMPLES)
    tables = "only these published tables"
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=tables)
    parser.add_argument("--table", nargs="+", action="extend", default=[], metavar="NAME", help="the same")
    parser.add_argument("--verbose", action="store_true", help="list every check")
    parser.add_argument("--csv", metavar="FILE", help="write all checks as CSV, one a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify, print the report, and return exit code 0 or 1. Raises ValueError for refusals."""
    quiet.quiet_libraries()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # models are built without memory: no GPU is looked for
    if args.csv:  # before minutes are spent
        args.csv = new_file("--csv", args.csv, own=(",".join(COLUMNS) + "\r\n").encode())
    from launch.tables import report_text, verification

    report = verification.verify([*args.tables, *args.table], progress=_progress)
    print(report_text.describe(report, verbose=args.verbose, width=terminal.columns()))
    if args.csv:
        write_atomically(args.csv, _as_csv(report))
        print(f"wrote {args.csv}")
    return 0 if report.passed else 1


def _progress(rows: Sequence[PublishedRow]) -> Iterator[PublishedRow]:
    """Show a bar on a terminal while models are built, and nothing in a log."""
    from tqdm import tqdm

    bar = tqdm(rows, file=sys.stderr, unit="row", disable=None, leave=False, dynamic_ncols=True)
    for row in bar:
        bar.set_description_str(row.full_name)
        yield row


def _as_csv(report: Report) -> str:
    """Return all checks as CSV (RFC 4180) with a heading."""
    texts, buffer = {check: erratum.text for check, erratum in report.explanations.items()}, io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS)
    writer.writeheader()
    writer.writerows({**asdict(check), "explanation": texts.get(check, "")} for check in report.checks)
    return buffer.getvalue()
