"""`benchmark.py layouts` and `benchmark.py scaling`: flags, measurement and output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.console import arguments, new_output, terminal
from launch.experiments.benchmarks import layout_speed, step_speed, step_text
from launch.experiments.benchmarks.layout_speed import STRONG, WEAK
from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.step_command import PICTURES, add_model, add_pace, model_line, pace_of
from launch.experiments.benchmarks.step_speed import RATE, Measurement
from recipes.layout import Layout
from recipes.problems import Problem, ProblemsError, counted

EXAMPLES = """\
examples:
  python launch/benchmark.py layouts
      TP2, DP2 and PP2 on this machine next to one process with all its cores,
      in turns
  python launch/benchmark.py layouts --set model.hidden=768 \\
      --set model.heads=12 --eager

  ideal      seconds that one process with all cores needs for as many tokens
  bubble     the pipeline's schedule has nothing to do for a stage
  waiting    for other ranks and their tensors, beyond that
  computing  the rest: smaller products, work that is done twice, memory that
             is shared"""

SCALING_EXAMPLES = """\
examples:
  python launch/benchmark.py scaling --plot scaling.png
      data parallelism on 1, 2, 4, ... processes, of which each has one core
      or one GPU
  python launch/benchmark.py scaling --kinds weak --processes 8 \\
      --ds_config zero2

  weak    each process has the same work: as many tokens more as processes
  strong  all share the work that the most processes have in weak scaling"""


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    _add_common_flags(parser)
    add_pace(parser)


def add_scaling_flags(parser: argparse.ArgumentParser) -> None:
    add = _add_common_flags(parser)
    kinds = (WEAK, STRONG)
    add("--kinds", nargs="+", choices=kinds, default=list(kinds), help="default: both")
    add(
        "--processes", type=arguments.whole(most=4096), metavar="N", help="the most (default: cores, or GPUs)"
    )
    add("--plot", metavar="FILE", help="draw the efficiencies, as .png, .svg or .pdf")
    add_pace(parser)


def _add_common_flags(parser: argparse.ArgumentParser) -> Any:
    add_model(parser)
    add = parser.add_argument_group("what is measured").add_argument
    add("--ds_config", default="zero1", metavar="FILE", help="but for the pipeline (default: %(default)s)")
    add("--eager", action="store_true", help="without torch.compile")
    return add


def specification_of(args: argparse.Namespace, system: str = "ours") -> Specification:
    compiled = not args.eager and system == "ours"
    settings = tuple(args.set)
    return Specification(system, system, args.recipe, settings, args.tiny, args.ds_config, compiled)


def one_process(args: argparse.Namespace) -> Layout:
    """Return the layout of the recipe in one process. Raises ValueError."""
    from ds_configs.resolver import resolve
    from launch.machine import abilities

    return resolve(specification_of(args).load(), args.ds_config, 1, abilities.detect_machine()).layout


def check_devices(needed: int, flag: str) -> None:
    """Check that every rank has its own GPU. Raises ProblemsError."""
    from launch.ranks.processes import device_limit

    limit = device_limit()
    if limit is not None and needed > limit:
        came, rule = f"{flag}: {counted(needed, 'process')}", f"each needs a GPU, and there are {limit}"
        raise ProblemsError([Problem(flag, came, rule, "DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= for CPUs")])


def measure_layouts(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure the layouts, print the tables and return the numbers. Raises ValueError."""
    cases = layout_speed.cases(specification_of(args), one_process(args))
    check_devices(2, "layouts")
    measured = measure(args, [case.spec for case in cases])
    rows = layout_speed.overheads(measured, cases)
    print(f"\n{layout_speed.overhead_table(rows)}\n\n{step_text.parts(measured)}")
    print(step_text.disturbance(measured))
    return {"rows": [asdict(row) for row in rows], "measured": [asdict(each) for each in measured]}


def measure_scaling(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure the scaling, print the tables and return the numbers. Raises ValueError."""
    most = args.processes or machine["accelerators"] or machine["cores"]
    specs = layout_speed.scaling_systems(specification_of(args), one_process(args), most, args.kinds)
    check_devices(most, "--processes")
    if args.plot is not None:
        new_output.new_file("--plot", args.plot, PICTURES)
    measured = measure(args, specs)
    found = layout_speed.efficiencies(measured)
    print(f"\n{step_text.speeds(step_speed.speed_rows(measured), specs[0].name)}\n")
    for kind, efficiency in found.items():
        said = ", ".join(f"{n}: {share:.0%}" for n, share in efficiency.items())
        print(f"{kind} scaling, tokens/s and process over those of the fewest processes: {said}")
    print(step_text.disturbance(measured))
    if args.plot is not None and found:
        layout_speed.draw_scaling(found, Path(args.plot), f"{args.recipe}, {args.ds_config}")
    return {"efficiency": found, "measured": [asdict(each) for each in measured]}


def measure(args: argparse.Namespace, specs: Sequence[Specification]) -> list[Measurement]:
    """Measure the systems and the matrix rate in turns."""
    terminal.say(model_line(specs))
    rate = specification_of(args, RATE)
    return step_speed.measure([*specs, rate], pace_of(args), terminal.say)
