"""Train a BERT with both placements of LayerNorm and plot the losses: figure 1 of Megatron-BERT, small.

python launch/figure1.py --out runs/figure1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path

from data.durable_files import write_atomically
from launch.console import arguments, ends, output
from launch.experiments.parity.placement_figure import PLACEMENTS, plot, summarise, table
from launch.ranks import ending
from recipes import catalog

EXAMPLES = """\
examples:
  python launch/figure1.py --out runs/figure1
      the recipe bert/figure1: a deep, narrow BERT on the packaged corpus, with the original (post-LN) and the
      rearranged (pre-LN) placement
  python launch/figure1.py --out runs/figure1-tiny --tiny
      both in seconds: shows that the command works, and nothing about the placements
  python launch/figure1.py --out runs/figure1-lr --set optimizer.lr=3e-4
      the same at another learning rate
  python launch/figure1.py --out runs/figure1 --resume
      resumes where an interrupted one stopped

The two runs differ in model.layer_norm alone: same parameters, same initial weights of everything but
LayerNorm, same batches. Writes figure1.png and figure1.json into --out, next to the two run directories. A
run that diverges is a result and is drawn.
exit codes: 0 both ran (diverged ones included), 1 one failed, 2 refused."""

DIVERGED = 3  # exit code of pretrain.py


def main() -> None:
    args = build_parser().parse_args()
    out = Path(args.out)
    try:
        recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
        if recipe.model.family != "bert":
            came = f"--recipe {args.recipe} is a {recipe.model.family}"
            raise ValueError(f"{came}: only a BERT has both placements; give bert/figure1 or another")
    except ValueError as e:
        ending.refuse(e)
    if args.resume:
        output.directory("--out", args.out)
    else:
        output.new_directory("--out", args.out, resumed=", or add --resume")
    codes = {}
    for placement in PLACEMENTS:
        codes[placement] = run(args, placement, out / placement)
        if codes[placement] == 0 and summarise(out / placement)["status"] == "interrupted":
            print(f"stopped on request; the same command with --resume continues {out}")
            return
    failed = [placement for placement, code in codes.items() if code not in (0, DIVERGED)]
    if failed:
        print(f"{', '.join(str(out / p) for p in failed)} did not finish: see above", file=sys.stderr)
        raise SystemExit(2 if all(codes[p] == 2 for p in failed) else 1)
    summary = {placement: summarise(out / placement) for placement in PLACEMENTS}
    write_atomically(out / "figure1.json", json.dumps(summary, indent=2) + "\n")
    curves = {label: out / p / "metrics.jsonl" for p, label in PLACEMENTS.items()}
    plot(curves, summary["pre"]["unigram_entropy"], out / "figure1.png", recipe.title)
    print("\n" + table(summary))
    print(f"\n{out}: figure1.png, figure1.json, and the run directories {', '.join(PLACEMENTS)}")


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    arguments.add_recipe_arguments(parser)
    parser.set_defaults(recipe="bert/figure1")
    parser.add_argument("--ds_config", metavar="FILE", help="DeepSpeed JSON (default: the recipe's own)")
    parser.add_argument("--out", metavar="DIR", required=True, help="directory for both runs and the figure")
    parser.add_argument("--resume", action="store_true", help="continue the runs that are there")
    return parser


def run(args: argparse.Namespace, placement: str, directory: Path) -> int:
    """One training, in a process of its own; its exit code."""
    script = str(Path(__file__).with_name("pretrain.py"))
    command = [sys.executable, script, "--recipe", args.recipe, "--out", str(directory), "--resume"]
    command += [f"--set={s}" for s in (*args.set, f"model.layer_norm={placement}")]
    command += ["--tiny"] if args.tiny else []
    command += ["--steps", str(args.steps)] if args.steps else []
    command += ["--ds_config", args.ds_config] if args.ds_config else []
    print(f"\n=== {PLACEMENTS[placement]}\n", flush=True)
    process = subprocess.Popen(command)
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # the training gets it too: it saves and ends
            return process.wait()


if __name__ == "__main__":
    ends.run(main)
