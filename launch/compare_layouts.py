"""Train one recipe in one process and under every parallel layout that fits, and compare the results.

python launch/compare_layouts.py --tiny
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends, new_output, terminal
from launch.experiments.parity.layout_cases import (
    CASES,
    DECIDED,
    FORCED,
    REFERENCE,
    LayoutCase,
    why_impossible,
)
from launch.machine import description
from launch.ranks import ending, launch_environment
from launch.ranks.processes import device_limit
from launch.records.titles import title_of
from recipes import catalog
from recipes.key_paths import key_of
from recipes.problems import Problem, ProblemsError, Setting, counted
from recipes.schema import Recipe

EXAMPLES = """\
examples:
  python launch/compare_layouts.py --tiny
      the default recipe, shrunk, under every layout of up to 8 processes
      (several share one CPU core)
  python launch/compare_layouts.py --recipe bert/sotu --steps 5 \\
      --only tp2 pp2 "dp2 zero3"
      another recipe at its full size, three layouts
  python launch/compare_layouts.py --tiny --set model.heads=6 \\
      --set model.hidden=96 --only tp2 tp3 tp4
      other shapes; a layout that the recipe cannot have is left out, here
      tp4, and before anything is trained
  python launch/compare_layouts.py --tiny --compile
      adds each layout with compiled layers

Every run takes the first 20 steps of the recipe's schedule, unless --steps or
--set steps= say otherwise. A layout decides the degrees of parallelism,
recomputation, the DeepSpeed JSON and, but for "own accumulation" and pp3, how
the recipe's global batch is accumulated. Every run is in fp32 without
dropout, and with optimizer.eps=1e-6, since with 1e-8 Adam turns the rounding
noise of gradients that are zero in exact arithmetic (the key biases) into
full steps; --set has the last word. dropout.hidden drops the same under every
layout and can be compared; dropout.attention is drawn inside the kernel and
follows the layout, as does all dropout of `transformers` rows.
It is a proof as launch/prove.py makes them (docs/proving.md): losses, norms,
and the tensors of the first and the last step may be as far from one process
as rounding explains, which is measured. Pure bf16 has a one process of its own.
exit codes: 0 all that were run agree, 1 some do not or failed, 2 refused
before anything was started."""

STEPS = 20  # by default
PICTURES = (".png", ".svg", ".pdf")
UNLISTED = "--recipe, --set, --steps, --tiny, --compile, --plot, --out"
RULES = (("--list", UNLISTED, "it lists the layouts of every recipe and ends"),)


def main() -> None:
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    cases = chosen_cases(args)
    if args.list:
        for c in cases:
            print(f"{c.name:<36} {counted(c.processes, 'process')}, {c.ds_config}")
        return
    try:
        refuse_tasks(os.environ)
        out = new_output.new_directory("--out", args.out) if args.out else None
        picture = (
            new_output.new_file("--plot", args.plot, PICTURES) if args.plot else None
        )
        recipe = chosen_recipe(args)
        left_out = impossible_cases(recipe, cases, most_processes(args.processes))
        check_data(recipe)
    except ValueError as e:
        ending.refuse(e)
    for reason in reasons(left_out):
        terminal.say(reason)
    cases = [case for case in cases if case.name not in left_out]
    if args.compile:
        cases += [case.with_compiled_layers() for case in (REFERENCE, *cases)]
    # as Ctrl-C, it ends the ranks, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # with torch, which no --help should wait for
    from launch.experiments.parity.layout_runs import Layouts

    with tempfile.TemporaryDirectory() as temporary:
        layouts = Layouts(recipe, out or Path(temporary))
        try:
            proven = layouts.proven(cases, keep=bool(out))
        except ProblemsError as failed:  # of one process
            print(failed)
            raise SystemExit(1) from None
    print(f"\n{proven.told(terminal.columns())}")
    if picture:
        # with matplotlib, which nothing else here needs
        from launch.experiments.parity.curves import draw_curves

        draw_curves(proven, picture, title_of(recipe))
    raise SystemExit(0 if proven.agrees else 1)


def reasons(left_out: Mapping[str, Sequence[Problem]]) -> list[str]:
    """Return one line per layout with the reasons for not running it."""
    return [
        f"{name} is not run: {'; '.join(map(str, problems))}"
        for name, problems in left_out.items()
    ]


def refuse_tasks(environ: Mapping[str, str]) -> None:
    """Refuse several starts of a command that starts its processes itself. Raises ProblemsError."""
    start = launch_environment.started(environ)
    if start and start.size > 1:
        raise ProblemsError.of(
            "processes",
            start.named,
            f"this command starts its processes itself, and {start.by} started it {start.size} times",
            "start it once, as with srun -n 1",
        )


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES, RULES)
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument
    add(
        "--processes",
        type=arguments.whole(),
        default=8,
        metavar="N",
        help="largest number of processes (default: 8)",
    )
    add("--only", nargs="+", metavar="LAYOUT", help="these layouts alone, by name")
    add("--list", action="store_true", help="list the layouts and exit")
    add(
        "--compile",
        action="store_true",
        help="also run every layout with compiled layers",
    )
    add(
        "--plot",
        metavar="FILE",
        help="draw the loss curves, and their differences, as .png, .svg or .pdf",
    )
    add(
        "--out",
        metavar="DIR",
        help="keep the run directories there (default: removed at the end)",
    )
    return parser


def chosen_cases(args: argparse.Namespace) -> list[LayoutCase]:
    """Return the requested layouts; layouts requested by name also if they have too many processes."""
    names = [c.name for c in CASES]
    unknown = [name for name in args.only or [] if name not in names]
    if unknown:
        ending.refuse(
            f"--only {'; '.join(unknown)}: no such layout; there are: {'; '.join(names)}"
        )
    if args.only:
        return [c for c in CASES if c.name in args.only]
    processes = most_processes(args.processes)
    if processes < args.processes:
        left_out = (
            f"layouts of more processes are left out (--processes {args.processes})"
        )
        print(f"this machine has {counted(processes, 'device')}: {left_out}")
    return [c for c in CASES if c.processes <= processes]


def most_processes(asked_for: int) -> int:
    """Return the largest number of processes of a layout on this machine."""
    return min(asked_for, device_limit() or asked_for)


def chosen_recipe(args: argparse.Namespace) -> Recipe:
    """Return the recipe for all layouts. Raises ProblemsError."""
    keys = {setting: key_of(setting) for setting in args.set}
    decided = tuple(f"{key}." for key in DECIDED)
    rule = "every layout decides it"
    fix = "leave it out, and name layouts with --only (--list shows them)"
    given = [
        (key, f"--set {setting}")
        for setting, key in keys.items()
        if f"{key}.".startswith(decided)
    ]
    if given:
        raise ProblemsError(Problem(key, came, rule, fix) for key, came in given)
    steps = STEPS if args.steps is None and "steps" not in keys.values() else args.steps
    recipe = catalog.load(
        args.recipe, [*FORCED, *args.set], tiny=args.tiny, steps=steps
    )
    if recipe.precision == "auto":
        raise ProblemsError.of(
            "precision",
            Setting("precision", "auto"),
            "the rounding that layouts are held to is that of a precision",
            "name one: fp32, bf16 or fp16",
        )
    if args.compile and recipe.model.implementation == "transformers":
        came = Setting("model.implementation", "transformers"), " with --compile"
        raise ProblemsError.of(
            "--compile",
            came,
            "these rows run transformers' modules uncompiled, as their source did",
            "leave --compile out",
        )
    return recipe


def impossible_cases(
    recipe: Recipe, cases: Sequence[LayoutCase], most: int
) -> Mapping[str, Sequence[Problem]]:
    """Map impossible layouts to their problems on this machine with `most` processes.

    Raises ValueError if no layout is left, or if the one-process reference is impossible.
    """
    machine = description.detect_machine()
    left_out = {}
    for case in (REFERENCE, *cases):
        problems = why_impossible(recipe, case, machine, most)
        if problems:
            left_out[case.name] = problems
    if REFERENCE.name in left_out or len(left_out) == len(cases):
        raise ValueError("\n".join(reasons(left_out)))
    return left_out


def check_data(recipe: Recipe) -> None:
    """Prepare vocabulary and tokens for all ranks. Raises ValueError if they are unavailable."""
    # takes transformers along, which no --help should wait for
    from data.corpus import build

    build(recipe, say=print)


if __name__ == "__main__":
    ends.run(main)
