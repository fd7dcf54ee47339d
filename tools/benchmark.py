"""Measure training steps and a GPU next to their bounds and to other systems.

python tools/benchmark.py step
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

if not __package__:
    import _clone_first  # noqa: F401

from data.durable_files import write_json
from launch.console import arguments, ends, new_output, terminal
from launch.machine import description
from launch.ranks import ending
from tools.benchmarks import gpu, kernels, step
from tools.benchmarks.results import Row, table

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

# Name -> (summary, module with EXAMPLES, RULES, TABLE, add_flags and rows).
COMMANDS: dict[str, tuple[str, Any]] = {
    "step": ("the training step next to others", step),
    "kernels": ("what a GPU does in a pass, counted without one", kernels),
    "gpu": ("all that one GPU can tell", gpu),
}


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (summary, module) in COMMANDS.items():
        command = arguments.subcommand(
            names, name, summary, None, module.EXAMPLES, module.RULES
        )
        module.add_flags(command)
        command.set_defaults(module=module)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    try:
        if args.out is not None:
            new_output.new_file("--out", args.out)
        measure(args)
    except ValueError as error:
        ending.refuse(error)


def measure(args: argparse.Namespace) -> None:
    """Write each row when it is there, and print the table at the end. Raises ValueError."""
    machine = description.describe()
    load = os.getloadavg()[0]
    summary = description.summary(machine)
    terminal.say(f"{summary}; load average at the start {load:.1f}")
    rows = list[Row]()
    result = {"command": sys.argv, "hardware": machine, "load_average": load}
    for row in args.module.rows(args, machine):
        rows.append(row)
        if args.out is not None:
            write_json(Path(args.out), {**result, "rows": rows})
    if rows:
        print(f"\n{table(rows, args.module.TABLE)}")


if __name__ == "__main__":
    ends.run(main)
