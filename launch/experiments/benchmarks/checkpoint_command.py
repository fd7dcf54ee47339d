"""`benchmark.py checkpoint`: its flags, and what it measures."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from launch.console import arguments, output, terminal
from launch.console.text_table import table
from launch.experiments.benchmarks.layout_command import check_devices
from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.step_command import add_model, plans_of
from launch.experiments.benchmarks.turns import Worker, WorkerFailed, ended
from recipes.problems import Problem, ProblemsError

EXAMPLES = """\
examples:
  python launch/benchmark.py checkpoint
      save and load of GPT-2 of 14M parameters in /tmp, next to a raw file of as many bytes
  python launch/benchmark.py checkpoint --folder $SCRATCH --processes 4 --set model.layers=24

  waited    training waits while the state is copied to memory
  whole     from there to the checkpoint's name: written, flushed, with its manifest
  checked   --resume compares checksums;  loaded: and reads it into the engine
GB/s are of all ranks' files; what the system keeps in memory is dropped before reading, where it lets one."""

ROWS = ("blocked", "saved", "checked", "loaded", "written", "read")
SHOWN = ("save: training waited", "save: whole", "load: checked", "load: loaded", "raw write", "raw read")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument_group("what is measured").add_argument
    add("--ds_config", default="zero1", metavar="FILE", help="default: %(default)s")
    add("--processes", type=arguments.whole(most=4096), default=1, metavar="N", help="data-parallel ranks")
    add("--folder", default=tempfile.gettempdir(), metavar="DIR", help="where (default: %(default)s)")
    add("--times", type=arguments.whole(most=1000), default=3, metavar="N", help="default: %(default)s")


def measure(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure and print; the numbers. Raises ValueError where it cannot be done like that."""
    batch = (f"parallel.dp={args.processes}",) if args.processes > 1 else ()
    spec = Specification(
        "checkpoint", "ours", args.recipe, (*args.set, *batch), args.tiny, args.ds_config,
        processes=args.processes,
    )  # fmt: skip
    folder = output.directory("--folder", args.folder)
    described = plans_of([spec])
    check_devices(args.processes, "--processes")
    terminal.say(described)
    try:
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix="benchmark-") as made,
            ended(Worker(spec, Path(made) / "worker")) as worker,
        ):
            worker.ask("run", 1)  # before a step there are no moments
            found = worker.ask("checkpoint", made, args.times)
    except WorkerFailed as error:
        rule, fix = "the state of a training is saved and loaded there", "see above, or name another --folder"
        raise ProblemsError([Problem("checkpoint", str(error), rule, fix)]) from None
    print(f"\n{shown(found)}")
    return {"model": described, "folder": str(folder), **found}


def shown(found: dict[str, Any]) -> str:
    """Medians."""
    cells = []
    for name, said in zip(ROWS, SHOWN, strict=True):
        seconds = statistics.median(found[name])
        cells.append((said, f"{seconds:.3f}", f"{found['bytes'] / seconds / 1e9:.2f}"))
    heading = f"{found['bytes'] / 1e6:,.1f} MB"
    return table(cells, (heading, "s", "GB/s"), "lrr")
