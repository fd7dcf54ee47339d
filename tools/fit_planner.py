"""Predict published rows by the planner, say how far off it is, and fit its constants again.

python tools/fit_planner.py
"""

from __future__ import annotations

import argparse

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends, terminal
from tools.planner import cases, csv_cases, fitting, validation

ABOUT = """\
Predict every published row that tells a time, a memory or that memory ran out, and print how far off the
planner is: the rows of recipes/, and several hundred of other papers and logs. The few fitted constants
(launch/planning/prediction/constants.yaml) were fitted once for each document without it, and its rows are
predicted by those. A line more of tools/planner/other_documents.csv is a row more."""
EXAMPLES = """\
examples:
  python tools/fit_planner.py
      errors of time, memory and verdicts, table by table
  python tools/fit_planner.py --verbose
      every row
  python tools/fit_planner.py --refit
      fit the constants again (two minutes on two cores), and write them to
      launch/planning/prediction/constants.yaml

exit codes: 0 shown, 2 refused."""


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(ABOUT, EXAMPLES)
    add = parser.add_argument
    add("--verbose", action="store_true", help="list every row")
    add("--refit", action="store_true", help="fit the constants again, and keep them")
    return parser


def main() -> None:
    """Predict the rows, or fit the constants again. Raises ProblemsError."""
    args = build_parser().parse_args()
    published = [*cases.of_published_tables(), *csv_cases.read()]
    if args.refit:
        fitting.refit(published)
    print(
        validation.describe(
            validation.validate(published),
            verbose=args.verbose,
            width=terminal.columns(),
        )
    )


if __name__ == "__main__":
    ends.run(main)
