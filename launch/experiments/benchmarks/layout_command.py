"""`benchmark.py layouts`: flags, measurement and output."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from launch.console import terminal
from launch.experiments.benchmarks import layout_speed, step_speed, step_text
from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.step_command import add_model, add_pace, model_line, pace_of
from launch.experiments.benchmarks.step_speed import RATE
from recipes.layout import Layout
from recipes.problems import Problem, ProblemsError

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


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument_group("what is measured").add_argument
    add("--ds_config", default="zero1", metavar="FILE", help="but for the pipeline (default: %(default)s)")
    add("--eager", action="store_true", help="without torch.compile")
    add_pace(parser)


def specification_of(args: argparse.Namespace, system: str = "ours") -> Specification:
    compiled = not args.eager and system == "ours"
    settings = tuple(args.set)
    return Specification(system, system, args.recipe, settings, args.tiny, args.ds_config, compiled)


def one_process(args: argparse.Namespace) -> Layout:
    """Return the layout of the recipe in one process. Raises ValueError."""
    from ds_configs.resolver import resolve
    from launch.machine import abilities

    return resolve(specification_of(args).load(), args.ds_config, 1, abilities.detect_machine()).layout


def check_devices() -> None:
    """Check that each of two ranks has its own GPU. Raises ProblemsError."""
    from launch.ranks.processes import device_limit

    limit = device_limit()
    if limit is not None and limit < 2:
        came, rule = "2 processes", f"each needs a GPU, and there is {limit}"
        raise ProblemsError(
            [Problem("layouts", came, rule, "DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= for CPUs")]
        )


def measure(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure the layouts, print the tables and return the numbers. Raises ValueError."""
    cases = layout_speed.cases(specification_of(args), one_process(args))
    check_devices()
    specs = [case.spec for case in cases]
    terminal.say(model_line(specs))
    measured = step_speed.measure([*specs, specification_of(args, RATE)], pace_of(args), terminal.say)
    rows = layout_speed.overheads(measured, cases)
    print(f"\n{layout_speed.overhead_table(rows)}\n\n{step_text.parts(measured)}")
    print(step_text.disturbance(measured))
    return {"rows": [asdict(row) for row in rows], "measured": [asdict(each) for each in measured]}
