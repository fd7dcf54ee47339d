"""The recipes: which there are, what one of them says, and what runs of it come to.

python launch/recipe.py list jeanzay_megatron_performance
python launch/recipe.py show dgx2_gpt2_model_parallel/72x3072-h32-tp8
"""

from __future__ import annotations

import argparse

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends
from launch.reports import reference_curve
from launch.tables import listing, showing

EXAMPLES = """\
examples:
  python launch/recipe.py list
      what to run first, then our other recipes, and a line for each published
      table; list TABLE shows its rows, list --all all of them
  python launch/recipe.py list --fits
      a row of each size that fits this machine; with --all every row that does
  python launch/recipe.py show dgx2_gpt2_model_parallel/72x3072-h32-tp8
      one row: everything resolved, what was published, what is inferred or
      unknown, how to launch it
  python launch/recipe.py show my_table.yaml/my-row --yaml
      a row of your own file, with every value written out
  python launch/recipe.py curve runs/mine-* --out mine.json
      the reference curve of your runs of one recipe, by which later ones are
      judged: --set curve=mine.json

exit codes: 0 shown; 1 output that cannot be written; 2 refused, or shown and
cannot be run as it is."""


def build_parser() -> argparse.ArgumentParser:
    """The subcommands' flags stand with the subcommands."""
    parser = arguments.command(__doc__, EXAMPLES)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{list,show,curve}"
    )
    for command in (listing, showing, reference_curve):
        command.add_parser(commands)
    return parser


def main() -> int:
    """Run the subcommand; the exit code."""
    args = build_parser().parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    ends.run(main)
