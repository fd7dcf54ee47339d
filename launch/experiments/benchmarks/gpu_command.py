"""`benchmark.py gpu`: flags, running its steps, and writing results after each."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.durable_files import write_atomically
from launch.console import arguments, output, terminal
from launch.console.text_table import table
from recipes import files
from recipes.problems import Problem, ProblemsError

if TYPE_CHECKING:
    from launch.experiments.benchmarks.gpu_steps import Context, Step

MOST_BYTES = 2**28  # in a results file

EXAMPLES = """\
examples:
  python launch/benchmark.py gpu
      everything that one GPU can tell, in steps of minutes; started again, it
      goes on after the last one
  python launch/benchmark.py gpu --minutes 9 --only 1.2b attention
      two steps, none of which is started later than nine minutes from now
  python launch/benchmark.py gpu --again 1.2b
      that step once more, and those that are not done
  python launch/benchmark.py gpu --on cpu --folder runs/walk
      every step on tiny shapes: shows that they work, and measures nothing

results.json in --folder has hardware, versions, command, goals and all
numbers, by step; results.txt shows them."""

RULES = (("--list", "*", "it lists the steps and ends"),)
NO_GPU = Problem(
    "gpu",
    "benchmark.py gpu on a machine without a GPU",
    "its steps measure one",
    "start it on a machine with a GPU, or walk through the steps on tiny shapes with --on cpu",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add("--only", nargs="+", metavar="STEP", help="these steps alone (--list shows them)")
    add("--again", nargs="+", default=[], metavar="STEP", help="also where they are done")
    add("--list", action="store_true", help="list the steps and exit")
    add("--on", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try the steps")
    minutes = arguments.whole(most=10**5)
    add("--minutes", type=minutes, metavar="N", help="start no step later than this (default: no limit)")
    folder = "results, traces, runs (default: %(default)s)"
    add("--folder", default="runs/benchmark-gpu", metavar="DIR", help=folder)


def measure(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Run the steps that are not done and return all results. Raises ValueError."""
    from launch.experiments.benchmarks import gpu_steps  # loads torch, too slow for --help

    steps = gpu_steps.STEPS
    if args.list:
        print(table((step.name, step.title) for step in steps))
        return {}
    chosen = chosen_steps(args, steps)
    if args.on == "cuda" and not machine["accelerators"]:
        raise ProblemsError([NO_GPU])
    folder = output.directory("--folder", args.folder).absolute()
    kept = read_results(folder, args.on, machine)
    folder.mkdir(parents=True, exist_ok=True)
    context = gpu_steps.Context(args.on == "cpu", folder, terminal.say)
    started = time.monotonic()
    for number, step in enumerate(chosen, 1):
        done = kept["steps"].get(step.name, {}).get("status") == "done"
        if done and step.name not in args.again:
            terminal.say(f"{step.name}: done before")
            continue
        if args.minutes and time.monotonic() - started > 60 * args.minutes:
            terminal.say(f"{step.name} and later steps: left for the next start (--minutes {args.minutes})")
            break
        terminal.say(f"\nstep {number} of {len(chosen)}: {step.name}, {step.title}")
        kept["steps"][step.name] = run_step(step, context) | {"command": sys.argv, "hardware": machine}
        write_results(folder, kept)
        terminal.say(result_text(step.name, kept["steps"][step.name]))
    return kept


def run_step(step: Step, context: Context) -> dict[str, Any]:
    """Run one step and return its result; a failure does not stop the other steps."""
    started = time.monotonic()
    result: dict[str, Any] = {"title": step.title, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    try:
        outcome = step.run(context)
        # Tiny shapes neither reach nor miss a goal.
        judged = [replace(goal, measured=None) if context.walks else goal for goal in outcome.goals]
        goals = [asdict(goal) | {"said": str(goal)} for goal in judged]
        result |= {"status": "done", "goals": goals, "said": outcome.said, "found": outcome.found}
    except Exception as error:  # of any kind: the next step may work
        told = str(error) if isinstance(error, ValueError) else traceback.format_exc()[-2000:]
        result |= {"status": "failed", "said": told}
    return result | {"seconds": time.monotonic() - started}


def chosen_steps(args: argparse.Namespace, steps: Sequence[Step]) -> list[Step]:
    """Return the steps requested by name, or all. Raises ProblemsError."""
    names = [step.name for step in steps]
    problems = [
        Problem(flag, f"{flag} {name}", f"the steps are {', '.join(names)}", "see --list")
        for flag, given in (("--only", args.only or []), ("--again", args.again))
        for name in given
        if name not in names
    ]
    if problems:
        raise ProblemsError(problems)
    return [step for step in steps if not args.only or step.name in args.only or step.name in args.again]


def read_results(folder: Path, device: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Read the results of earlier starts. Raises ProblemsError if they are from another machine."""
    new = {"on": device, "accelerator": machine["accelerator"], "steps": {}}
    path = folder / "results.json"
    if not path.exists():
        return new
    kept: dict[str, Any] = files.read_json_object(path, MOST_BYTES)
    was, is_ = ((each.get("on"), each.get("accelerator")) for each in (kept, new))
    if was != is_ or not isinstance(kept.get("steps"), dict):
        came, rule = f"{path} is of {was}, and this is {is_}", "one file is of one machine"
        raise ProblemsError([Problem("--folder", came, rule, "name another --folder")])
    return kept


def write_results(folder: Path, kept: dict[str, Any]) -> None:
    """Write all results as JSON and as text."""
    write_atomically(folder / "results.json", json.dumps(kept, indent=1, default=str) + "\n")
    text = "\n\n".join(result_text(name, result) for name, result in kept["steps"].items())
    write_atomically(folder / "results.txt", f"{kept['accelerator']}, {kept['on']}\n\n{text}\n")


def result_text(name: str, result: dict[str, Any]) -> str:
    """Return one step's result as text: goals with measured values, then the rest."""
    first = f"{name}: {result['title']}: {result['status']} after {result['seconds']:.0f} s"
    goals = [goal["said"] for goal in result.get("goals", [])]
    return "\n".join([first, *goals, result["said"]])
