"""Train one recipe under one process and under every parallel layout that fits, and compare what came out.

python launch/compare_layouts.py --tiny
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from launch.console import arguments, quiet
from launch.machine import ending
from launch.machine.processes import device_limit
from launch.parity.comparison import compare, table
from launch.parity.curves import PICTURES, draw_curves
from launch.parity.layout_cases import CASES, FORCED, REFERENCE, LayoutCase
from launch.parity.layout_runs import run_cases
from recipes import catalog

EXAMPLES = """\
examples:
  python launch/compare_layouts.py --tiny
      the default recipe, shrunk, under every layout of up to 8 processes (several share one CPU core)
  python launch/compare_layouts.py --tiny --processes 2 --only tp2 pp2
      two layouts
  python launch/compare_layouts.py --tiny --compile
      adds each layout with compiled layers, and what compiling gains

Every run is in fp32 without dropout, and with optimizer.eps=1e-6, since with 1e-8 Adam turns the rounding
noise of gradients that are zero in exact arithmetic (the key biases) into full steps. A layout agrees when
every step's loss is within 1e-4 of the one-process run and every gradient norm within 1e-4 of it, relatively.
exit codes: 0 all agree, 1 some do not or failed, 2 refused."""


def main() -> None:
    args = build_parser().parse_args()
    cases = chosen_cases(args)
    if args.list:
        print("\n".join(f"{c.name:<36} {c.processes} processes, {c.ds_config}" for c in cases))
        return
    quiet.quiet_libraries()
    if args.out and Path(args.out).exists() and any(Path(args.out).iterdir()):
        never = "runs are never overwritten or mixed"
        ending.refuse(f"--out {args.out} is not empty, and {never}: name a new directory")
    if args.plot and not (Path(args.plot).parent.is_dir() and Path(args.plot).suffix in PICTURES):
        ending.refuse(
            f"--plot {args.plot}: name a file that ends in {', '.join(PICTURES)}, in a directory that exists"
        )
    try:
        recipe = catalog.load(args.recipe, [*FORCED, *args.set], tiny=args.tiny)
        recipe = recipe.model_copy(update={"steps": args.steps or 20})
    except ValueError as e:
        ending.refuse(e)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(args.out or temporary)
        reference, *others = run_cases(recipe, [REFERENCE, *cases], out)
    rows = [compare(reference, other) for other in others]
    print("\n" + table(reference, rows))
    if args.plot:
        draw_curves(reference, others, Path(args.plot), recipe.title)
    raise SystemExit(0 if all(row.agrees for row in rows) else 1)


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument
    add("--processes", type=int, default=8, metavar="N", help="largest number of processes (default: 8)")
    add("--only", nargs="+", metavar="LAYOUT", help="these layouts alone, by name")
    add("--list", action="store_true", help="list the layouts and exit")
    add("--compile", action="store_true", help="also run every layout with compiled layers")
    add("--plot", metavar="FILE", help="draw the loss curves, and their differences, as .png or .svg")
    add("--out", metavar="DIR", help="keep the run directories there (default: removed at the end)")
    return parser


def chosen_cases(args: argparse.Namespace) -> list[LayoutCase]:
    names = [c.name for c in CASES]
    if unknown := [name for name in args.only or [] if name not in names]:
        ending.refuse(f"--only {', '.join(unknown)}: no such layout; there are: {', '.join(names)}")
    processes = min(args.processes, device_limit() or args.processes)
    cases = [c for c in CASES if (not args.only or c.name in args.only) and c.processes <= processes]
    if processes < args.processes:
        left_out = f"layouts of more processes are left out (--processes {args.processes})"
        print(f"this machine has {processes} devices: {left_out}")
    return [*cases, *(c.with_compiled_layers() for c in [REFERENCE, *cases] if args.compile)]


if __name__ == "__main__":
    main()
