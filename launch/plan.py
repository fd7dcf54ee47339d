"""What fits, how fast it will be, and which layout to take, before a GPU is paid for.

python launch/plan.py --recipe dgx2_gpt2_model_parallel/72x3072-h32-tp8
python launch/plan.py --recipe openwebtext/gpt2-124m --hardware a100-80x8 --nodes 2
"""

from __future__ import annotations

import argparse
import sys

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends
from launch.planning.prediction import forecast_command
from launch.planning.search import search_command
from recipes.problems import ProblemsError

EXAMPLES = """\
examples:
  python launch/plan.py --recipe dgx2_gpt2_model_parallel/72x3072-h32-tp8
      memory and time of a published row on the hardware that it names
  python launch/plan.py search --model 13b --hardware v100-32x8 --nodes 8
      the fastest layout of a GPT of 13 billion parameters on 64 V100
  python launch/plan.py --fits openwebtext/gpt2-124m
      the nodes of the catalogue that carry a recipe
  python launch/plan.py --fits openwebtext/gpt2-124m --hardware 4xv100-32
      whether four V100 do; with --nodes 2 whether two such nodes do
  python launch/plan.py search --largest --hardware 2080ti
      the largest model that one GPU of 11 GB trains, by configuration
  python launch/plan.py --recipe openwebtext/gpt2-124m --hardware mine.yaml:box
      on a node that the catalogue lacks: docs/planning.md has such a file

exit codes: 0 shown; 1 no node carries it (--fits); 2 refused."""


def build_parser() -> argparse.ArgumentParser:
    """The subcommands' flags stand with the subcommands."""
    parser = arguments.command(__doc__, EXAMPLES, forecast_command.RULES)
    forecast_command.add_arguments(parser)
    commands = parser.add_subparsers(
        title="other questions", metavar="", dest="question"
    )
    search_command.add_parser(commands)
    return parser


def main() -> int:
    """Run the subcommand; the exit code."""
    args = build_parser().parse_args()
    written = sys.argv[1:]
    # the subcommand's defaults have taken their place
    if args.question and written[0] != args.question:
        raise ProblemsError.of(
            written[0],
            " ".join(written[: written.index(args.question) + 1]),
            "each question has flags of its own",
            f"write them after it: plan.py {args.question} {written[0]} …",
        )
    return int(args.run(args))


if __name__ == "__main__":
    ends.run(main)
