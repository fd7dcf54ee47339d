"""Predict published rows by the planner, say how far off it is, and fit its constants again.

python tools/fit_planner.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

# run from a checkout: tools are not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.console import arguments, ends, terminal
from launch.console.text_table import aligned
from recipes.files import path_of
from recipes.problems import Problem, ProblemsError
from tools.planner import csv_cases, fitting, validation

ABOUT = """\
Predict every published row that tells a time, a memory or that memory ran out, and print how far off the
planner is: the rows of recipes/, and several hundred of other papers and logs. The few fitted constants
(launch/planning/prediction/constants.yaml) were fitted once for each document without it, and its rows are
predicted by those."""
EXAMPLES = """\
examples:
  python tools/fit_planner.py
      errors of time, memory and verdicts, table by table
  python tools/fit_planner.py --verbose
      every row
  python tools/fit_planner.py --table mine.csv
      the errors on rows of your own; --columns says what a row can state,
      such as the task of a fine-tuning
  python tools/fit_planner.py --refit
      fit the constants again (two minutes on two cores), and write them to
      launch/planning/prediction/constants.yaml

exit codes: 0 shown, 2 refused."""

RULES = (("--columns", "*", "it lists the columns and ends"),)


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(ABOUT, EXAMPLES, RULES)
    add = parser.add_argument
    table = (
        "predict the rows of this file only; a column that --columns lacks is refused"
    )
    add("--table", metavar="FILE.csv", help=table)
    add("--columns", action="store_true", help="list the columns of such a file")
    add("--verbose", action="store_true", help="list every row")
    add("--refit", action="store_true", help="fit the constants again, and keep them")
    return parser


def main() -> int:
    """Predict the rows, or fit the constants again; the exit code. Raises ProblemsError."""
    args = build_parser().parse_args()
    width = terminal.columns()
    if args.columns:
        print(aligned(csv_cases.COLUMNS.items(), width=width))
        return 0
    own = path_of(args.table, "--table") if args.table else None
    if own and not own.exists():
        fix = "give a CSV file, whose columns --columns lists"
        raise ProblemsError([Problem("--table", f"--table {own}", "no such file", fix)])
    cases = csv_cases.read(own) if own else csv_cases.published_cases()
    if args.refit:
        fitting.refit(csv_cases.published_cases())
    print(
        validation.describe(
            validation.validate(cases), verbose=args.verbose, width=width
        )
    )
    return 0


if __name__ == "__main__":
    ends.run(main)
