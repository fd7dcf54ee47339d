"""`launch/plan.py validate`: the planner's error on published rows, and its constants fitted again."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from data.durable_files import write_atomically
from launch.console import arguments, terminal
from launch.console.output import new_file
from launch.planning.prediction import constants

if TYPE_CHECKING:
    from launch.planning.fitting.cases import Case

ABOUT = """\
Predict every published row that tells a time, a memory or that memory ran
out, and print how far off the planner is: the rows of recipes/, and several
hundred of other papers and logs. The few fitted constants
(launch/planning/prediction/constants.yaml) were fitted once for each document
without it, and its rows are predicted by those."""
EXAMPLES = """\
examples:
  python launch/plan.py validate
      errors of time, memory and verdicts, table by table
  python launch/plan.py validate --verbose --plot errors.png \\
      --json errors.json
      every row, drawn, and for a program
  python launch/plan.py validate --table mine.csv
      the errors on rows of your own; --columns says what a row can state
  python launch/plan.py validate --refit
      fit the constants again (two minutes on two cores), and write them to
      launch/planning/prediction/constants.yaml

exit codes: 0 shown, 2 refused."""
HEADING = """\
# The planner's constants. What each is: launch/planning/prediction/constants.py. Fitted by
#     python launch/plan.py validate --refit
# constants: on all documents; left_out: without that one, by which its own rows are predicted; fitted_on:
# rows with a time, and with a memory.
"""
JSON_BEGINNING = b'{\n  "tables"'


def add_parser(commands: Any) -> None:
    """Add the subcommand `validate` to the subparsers of launch/plan.py."""
    parser = commands.add_parser(
        "validate", help="the planner's error on published rows", description=ABOUT, epilog=EXAMPLES,
        formatter_class=arguments.HELP, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--table", metavar="FILE.csv", type=Path, help="predict the rows of this file alone")
    parser.add_argument("--columns", action="store_true", help="list the columns of such a file")
    parser.add_argument("--verbose", action="store_true", help="list every row")
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw predicted against published (.png, .svg)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every number as JSON")
    parser.add_argument("--refit", action="store_true", help="fit the constants again, and keep them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0. Raises ProblemsError."""
    if args.columns:
        print(_columns())
        return 0
    if args.plot:
        new_file("--plot", args.plot, (".png", ".svg"))
    if args.json:
        new_file("--json", args.json, own=JSON_BEGINNING)
    # Here and below: a forecast does without.
    from launch.planning.fitting import csv_cases, validation, validation_text

    cases = csv_cases.read(args.table) if args.table else published()
    if args.refit:
        refit(published())
    found = validation.validate(cases)
    print(validation_text.describe(found, verbose=args.verbose, width=terminal.columns()))
    if args.plot:
        from launch.planning.fitting import validation_plot

        validation_plot.draw(found, args.plot)
        print(f"\nwrote {args.plot}")
    if args.json:
        write_atomically(args.json, json.dumps(validation_text.as_json(found), indent=2) + "\n")
        print(f"\nwrote {args.json}")
    return 0


def published() -> list[Case]:
    """The rows of recipes/ and of other documents."""
    from launch.planning.fitting import csv_cases
    from launch.planning.fitting.cases import of_published_tables

    return [*of_published_tables(), *csv_cases.read(csv_cases.OURS)]


def refit(cases: Sequence[Case]) -> None:
    """Fit the constants, on all documents and without each, and write them."""
    from launch.planning.fitting import fitting
    from launch.planning.fitting.cases import by_document

    documents = by_document(cases)
    terminal.say(f"fitting {len(fitting.TIME) + len(fitting.MEMORY)} constants {len(documents) + 1} times …")
    fits = fitting.fit_leaving_out(documents, os.cpu_count() or 1)
    rows = {
        name: [len(fitting.time_ratios(own, fits[""])), len(fitting.memory_ratios(own, fits[""]))]
        for name, own in documents.items()
    }

    def plain(values: constants.Constants) -> dict[str, float]:
        return {name: round(value, 4) for name, value in values.model_dump().items()}

    document = {
        "constants": plain(fits.pop("")),
        "fitted_on": {name: counts for name, counts in rows.items() if any(counts)},
        "left_out": {name: plain(values) for name, values in fits.items() if any(rows[name])},
    }
    text = HEADING + yaml.safe_dump(document, sort_keys=False, width=110, default_flow_style=None)
    write_atomically(constants.FILE, text)
    constants.forget()
    print(f"wrote {constants.FILE}\n")


def _columns() -> str:
    from launch.console.text_table import aligned
    from launch.planning.fitting import csv_cases

    return aligned(csv_cases.COLUMNS.items(), width=terminal.columns())
