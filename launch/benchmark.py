"""Measure training steps, layouts and a GPU next to their bounds and to other systems.

python launch/benchmark.py step
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from launch.console import arguments, ends, new_output, quiet
from launch.experiments.benchmarks import gpu_command, kernel_command, layout_command, step_command
from launch.machine import description
from launch.ranks import ending

EXAMPLES = """\
examples:
  python launch/benchmark.py step
      our training step next to transformers, a bare loop, a plain GPT-2, and
      the machine's matrix rate
  python launch/benchmark.py layouts
      tensor, pipeline and data parallelism here next to one process, and
      where the difference goes
  python launch/benchmark.py kernels
      kernels, bytes and waits of a GPU, counted without one
  python launch/benchmark.py gpu
      everything that one GPU can tell, in steps of minutes
exit codes: 0 measured, 1 failed, 2 refused."""

# Name -> (summary, examples, function that adds the flags, function that measures).
COMMANDS: dict[str, tuple[str, str, Any, Any]] = {
    "step": (
        "the training step next to others",
        step_command.EXAMPLES,
        step_command.add_flags,
        step_command.measure,
    ),
    "layouts": (
        "what TP2, PP2 and DP2 cost here",
        layout_command.EXAMPLES,
        layout_command.add_flags,
        layout_command.measure,
    ),
    "kernels": (
        "what a GPU does in a pass, counted without one",
        kernel_command.EXAMPLES,
        kernel_command.add_flags,
        kernel_command.measure,
    ),
    "gpu": ("all that one GPU can tell", gpu_command.EXAMPLES, gpu_command.add_flags, gpu_command.measure),
}

RULES = {
    "gpu": (("--list", "*", "it lists the steps and ends"),),
    "step": (("--ranks", "--set parallel.dp", "both decide it"),),
}


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (summary, examples, add_flags, measure) in COMMANDS.items():
        command = arguments.subcommand(benchmarks, name, summary, None, examples, RULES.get(name, ()))
        add_flags(command)
        command.add_argument("--out", metavar="FILE", help="write all numbers as JSON")
        command.set_defaults(measure=measure)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    quiet.quiet_libraries()
    try:
        if args.out is not None:
            new_output.new_file("--out", args.out)
        machine, load = description.describe(), os.getloadavg()[0]
        print(f"{description.summary(machine)}; load average at the start {load:.1f}", flush=True)
        result = {"command": sys.argv, "hardware": machine, "load_average": load}
        result |= args.measure(args, machine)
    except ValueError as error:
        ending.refuse(error)
    if args.out is not None:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    ends.run(main)
