"""Look into the checkpoints of a run: what there is, whether it is whole, how two differ.

python launch/checkpoint.py show runs/default-sotu-zero3_offload
python launch/checkpoint.py verify runs/default-sotu-zero3_offload
python launch/checkpoint.py diff runs/a runs/b
"""

from __future__ import annotations

import argparse

from launch.console import arguments, ends, quiet
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
  python launch/checkpoint.py diff runs/a/checkpoints/step-000100 runs/b \\
      --step 100
      the largest difference of each tensor, whatever layouts saved the two

RUN is a run directory, its checkpoints/, or one step-NNNNNN of them. No GPU
is needed, and the memory of one tensor. Any layout reads any checkpoint:
`pretrain.py --resume` goes on from it, `--init_from` takes its weights, and
`export_hf.py` writes them for transformers.
exit codes: 0 shown, whole, or equal; 1 damaged, or different; 2 refused."""
SHOW = "exit codes: 0 shown, 2 refused."
VERIFY = """\
exit codes: 0 all whole; 1 damaged: each file is named, with the tensors it
holds; 2 refused."""
DIFF = """\
Of a run the newest whole checkpoint is taken. "absolute" is the largest
difference of two elements, "relative" the same by the largest magnitude of an
element of that tensor. NaN differs from everything.
exit codes: 0 equal to the bit, 1 different, 2 refused: not two checkpoints of
one model."""
COMMANDS = (
    ("show", ["run"], "what there is", "Show a run's checkpoints, or what is in one.", SHOW),
    ("verify", ["run"], "whether it is whole", "Read checkpoints and say what is damaged.", VERIFY),
    ("diff", ["a", "b"], "how two differ", "Show how far each tensor of two checkpoints differs.", DIFF),
)


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(str(__doc__).split("\n\n")[0], EXAMPLES)
    commands = parser.add_subparsers(required=True, dest="command", metavar="{show,verify,diff}")
    for name, runs, what, description, epilog in COMMANDS:
        add = arguments.subcommand(commands, name, what, description, epilog).add_argument
        for run in runs:
            add(run, metavar=run.upper(), help="run directory, its checkpoints/, or one step-NNNNNN of them")
        add("--step", type=arguments.whole(0), metavar="N", help="the checkpoint after N optimizer steps")
        if name == "diff":
            most = "show the N tensors that differ most, 0: all (default: %(default)s)"
            add("--most", type=arguments.whole(0), default=20, metavar="N", help=most)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    quiet.quiet_libraries()
    from launch.checkpoints import showing  # with torch

    if args.command == "diff":
        return showing.diff(path_of(args.a, "RUN"), path_of(args.b, "RUN"), args.step, args.most)
    return getattr(showing, args.command)(path_of(args.run, "RUN"), args.step)


if __name__ == "__main__":
    ends.run(main)
