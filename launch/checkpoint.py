"""Look into the checkpoints of a run: what there is, and whether it is whole.

python launch/checkpoint.py show runs/default-sotu-zero3_offload
python launch/checkpoint.py verify runs/default-sotu-zero3_offload
"""

from __future__ import annotations

import argparse

from launch.console import arguments, ends, terminal
from recipes.files import path_of

EXAMPLES = """\
examples:
  python launch/checkpoint.py show runs/default-sotu-zero3_offload
      every checkpoint of the run: step, size, the layout that saved it,
      whether its files are there
  python launch/checkpoint.py show runs/default-sotu-zero3_offload --step 200
      one of them, with its tensors
  python launch/checkpoint.py verify runs/default-sotu-zero3_offload
      read every byte: checksums, tensors and shapes of the recipe's model,
      NaN and infinity

RUN is a run directory, its checkpoints/, or one step-NNNNNN of them. No GPU
is needed, and the memory of one tensor. Any layout reads any checkpoint:
`pretrain.py --resume` goes on from it, `--init_from` takes its weights, and
`export_hf.py` writes them for transformers.
exit codes: 0 shown, or whole; 1 damaged; 2 refused."""
SHOW = "exit codes: 0 shown, 2 refused."
VERIFY = """\
exit codes: 0 all whole; 1 damaged: each file is named, with the tensors it
holds; 2 refused."""
COMMANDS = (
    ("show", "what there is", "Show a run's checkpoints, or what is in one.", SHOW),
    (
        "verify",
        "whether it is whole",
        "Read checkpoints and say what is damaged.",
        VERIFY,
    ),
)


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(str(__doc__).split("\n\n")[0], EXAMPLES)
    commands = parser.add_subparsers(
        required=True, dest="command", metavar="{show,verify}"
    )
    for name, what, description, epilog in COMMANDS:
        add = arguments.subcommand(
            commands, name, what, description, epilog
        ).add_argument
        add(
            "run",
            metavar="RUN",
            help="run directory, its checkpoints/, or one step-NNNNNN of them",
        )
        add(
            "--step",
            type=arguments.whole(0),
            metavar="N",
            help="the checkpoint after N optimizer steps",
        )
    return parser


def main() -> int:
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    from launch.checkpoints import showing  # with torch

    return getattr(showing, args.command)(path_of(args.run, "RUN"), args.step)


if __name__ == "__main__":
    ends.run(main)
