"""The subcommand `launch/plan.py validate`: the planner's error on published rows, and a new fit."""

from __future__ import annotations

import argparse
from typing import Any

from launch.console import arguments, terminal
from launch.console.text_table import aligned
from recipes.files import path_of

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
  python launch/plan.py validate --verbose
      every row
  python launch/plan.py validate --table mine.csv
      the errors on rows of your own; --columns says what a row can state,
      such as the task of a fine-tuning
  python launch/plan.py validate --refit
      fit the constants again (two minutes on two cores), and write them to
      launch/planning/prediction/constants.yaml

exit codes: 0 shown, 2 refused."""

RULES = (("--columns", "*", "it lists the columns and ends"),)


def add_parser(commands: Any) -> None:
    """Add the subcommand `validate` to the subparsers of launch/plan.py."""
    line = "the planner's error on published rows"
    parser = arguments.subcommand(commands, "validate", line, ABOUT, EXAMPLES, RULES)
    add = parser.add_argument
    add(
        "--table",
        metavar="FILE.csv",
        help="predict the rows of this file alone; a column that --columns lacks is refused",
    )
    add("--columns", action="store_true", help="list the columns of such a file")
    add("--verbose", action="store_true", help="list every row")
    add("--refit", action="store_true", help="fit the constants again, and keep them")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Validate the planner or fit it again, and return exit code 0. Raises ProblemsError."""
    # Here and below: a forecast does without.
    from launch.planning.fitting import csv_cases, fitting, validation

    if args.columns:
        print(aligned(csv_cases.COLUMNS.items(), width=terminal.columns()))
        return 0
    cases = csv_cases.read(path_of(args.table, "--table")) if args.table else csv_cases.published_cases()
    if args.refit:
        fitting.refit(csv_cases.published_cases())
    found = validation.validate(cases)
    print(validation.describe(found, verbose=args.verbose, width=terminal.columns()))
    return 0
