"""Measure training steps and a GPU next to their bounds and to other systems.

python tools/benchmark.py step
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# run from a checkout: tools are not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.console import arguments, ends, new_output, terminal
from launch.machine import description
from launch.ranks import ending
from tools.benchmarks import gpu_command, kernel_command, step_command

EXAMPLES = """\
examples:
  python tools/benchmark.py step
      our training step next to transformers, a bare loop, a plain GPT-2, and
      the machine's matrix rate
  python tools/benchmark.py kernels
      kernels, bytes and waits of a GPU, counted without one
  python tools/benchmark.py gpu
      everything that one GPU can tell, in steps of minutes
exit codes: 0 measured, 1 failed, 2 refused."""

# Name -> (summary, module with EXAMPLES, RULES, add_flags and measure).
COMMANDS: dict[str, tuple[str, Any]] = {
    "step": ("the training step next to others", step_command),
    "kernels": ("what a GPU does in a pass, counted without one", kernel_command),
    "gpu": ("all that one GPU can tell", gpu_command),
}


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    benchmarks = parser.add_subparsers(
        dest="benchmark", required=True, metavar="BENCHMARK"
    )
    for name, (summary, module) in COMMANDS.items():
        command = arguments.subcommand(
            benchmarks, name, summary, None, module.EXAMPLES, module.RULES
        )
        module.add_flags(command)
        command.add_argument("--out", metavar="FILE", help="write all numbers as JSON")
        command.set_defaults(measure=module.measure)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    try:
        if args.out is not None:
            new_output.new_file("--out", args.out)
        machine = description.describe()
        load = os.getloadavg()[0]
        print(
            f"{description.summary(machine)}; load average at the start {load:.1f}",
            flush=True,
        )
        result = {"command": sys.argv, "hardware": machine, "load_average": load}
        result |= args.measure(args, machine)
    except ValueError as error:
        ending.refuse(error)
    if args.out is not None:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    ends.run(main)
