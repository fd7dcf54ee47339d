"""`benchmark.py gpu`: flags, running the commands of its steps, and writing results after each of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.durable_files import write_atomically
from launch.console import arguments, launch_lines, new_output, terminal
from launch.console.text_table import table
from launch.experiments.launching import ROOT, own_environment
from recipes import files
from recipes.problems import Problem, ProblemsError
from tools.benchmarks import gpu_steps
from tools.benchmarks.gpu_steps import Command, GpuStep

MOST_BYTES = 2**28  # in a results file
LIMIT_S = 300  # of a command
TOO_LONG = 124  # exit code of what took longer, as timeout(1) has it
MOST_SAID = 8000  # characters of output
MOST_OF_TRAINING = 1500  # of a training, which ends with its result

EXAMPLES = """\
examples:
  python tools/benchmark.py gpu
      everything that one GPU can tell, in commands of five minutes at most;
      started again, it goes on after the last one, and repeats those that
      failed once there are no others
  python tools/benchmark.py gpu --minutes 9 --only 1.2b attention
      two steps, once more if they are done, of which no command is started
      later than nine minutes from now
  python tools/benchmark.py gpu --on cpu --folder runs/walk
      every step on tiny shapes: shows that they work, and measures nothing

tools/gpu.yaml lists the steps and their commands. results.json in --folder has
hardware, versions, commands, goals and all numbers, by step; results.txt
shows them."""

RULES = (("--list", "*", "it lists the steps and ends"),)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add(
        "--only",
        nargs="+",
        metavar="STEP",
        help="only these steps; once more if all are done",
    )
    add("--list", action="store_true", help="list the steps and exit")
    add(
        "--on",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny shapes, to try the steps",
    )
    minutes = arguments.whole(most=10**5)
    add(
        "--minutes",
        type=minutes,
        metavar="N",
        help="start no command later than this (default: no limit)",
    )
    folder = "results, traces, runs (default: %(default)s)"
    add("--folder", default="runs/benchmark-gpu", metavar="DIR", help=folder)


def measure(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Run the steps that are not done and return all results. Raises ValueError."""
    if args.list:
        print(table((step.name, step.title) for step in gpu_steps.STEPS))
        return {}
    chosen = chosen_steps(args.only)
    if args.on == "cuda" and not machine["accelerators"]:
        came = "benchmark.py gpu without a GPU"
        fix = "--on cpu walks through the steps on tiny shapes"
        raise ProblemsError([Problem("--on", came, "its steps measure one", fix)])
    folder = arguments.directory("--folder", args.folder).absolute()
    kept = read_results(folder, args.on, machine)
    folder.mkdir(parents=True, exist_ok=True)
    # from now on it is known as ours, whose steps are replaced
    write_results(folder, kept)
    tiny = args.on == "cpu"
    left = commands_left(chosen, kept["steps"], tiny)
    if args.only and not left:
        for step in chosen:
            del kept["steps"][step.name]
            shutil.rmtree(folder / step.name, ignore_errors=True)
        left = commands_left(chosen, kept["steps"], tiny)
    started = time.monotonic()
    # as Ctrl-C, it ends the running command, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for step, number, command in left:
        if args.minutes and time.monotonic() - started > 60 * args.minutes:
            terminal.say(
                f"{step.name} {number} and what follows: left for the next start"
            )
            break
        line = launch_lines.quoted(command)
        terminal.say(
            f"\n{step.name} {number} of {len(step.commands)} ({step.title}): {line}"
        )
        found = run_command(
            command, empty_place(folder / step.name / str(number), command)
        )
        terminal.say(outcome_text(found))
        result = kept["steps"].setdefault(
            step.name, {"title": step.title, "goal": step.goal, "commands": []}
        )
        result["hardware"] = machine
        result["commands"][number - 1 : number] = [found]
        write_results(folder, kept)
    failed = [name for name, result in kept["steps"].items() if failures(result)]
    if failed:
        terminal.say(
            f"\ncommands failed in {', '.join(failed)}: run again by a start that finds no new ones"
        )
    return kept


def failures(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the commands of a step's result that failed."""
    return [command for command in result["commands"] if command["code"]]


def commands_left(
    steps: Sequence[GpuStep], results: dict[str, Any], tiny: bool
) -> list[tuple[GpuStep, int, Command]]:
    """List the commands without a result, with their numbers from 1; if all have one, those that failed."""
    new = []
    failed = []
    for step in steps:
        done = results.get(step.name, {"commands": []})["commands"]
        for number, given in enumerate(step.commands, 1):
            command = gpu_steps.tiny(given) if tiny else given
            before = done[number - 1] if number <= len(done) else None
            if before is None or tuple(before["command"]) != command:
                new.append((step, number, command))
            elif before["code"]:
                failed.append((step, number, command))
    return new or failed


def chosen_steps(names: Sequence[str] | None) -> list[GpuStep]:
    """Return the steps requested by name, or all. Raises ProblemsError."""
    known = [step.name for step in gpu_steps.STEPS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        rule = f"the steps are {', '.join(known)}"
        raise ProblemsError(
            Problem("--only", f"--only {name}", rule, "see --list") for name in unknown
        )
    return [step for step in gpu_steps.STEPS if not names or step.name in names]


def empty_place(place: Path, command: Command) -> Path:
    """Make an empty folder for a command, without what an ended start of it has written elsewhere."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if "--out" in command and "--resume" not in command:
        out = place / command[command.index("--out") + 1]
        shutil.rmtree(out, ignore_errors=True)
    return place


def run_command(command: Command, folder: Path) -> dict[str, Any]:
    """Run a command in a folder of its own and return its numbers, or what it says."""
    script, *flags = command
    words = [sys.executable, str(ROOT / script), *flags]
    started = time.monotonic()
    code, said, error = run_limited(words, folder)
    found = {"command": command, "code": code, "seconds": time.monotonic() - started}
    most = MOST_OF_TRAINING if script == gpu_steps.TRAIN else MOST_SAID
    found["said"] = last_lines(said, most)
    if code:
        found["error"] = last_lines(error, MOST_SAID)
    out = folder / flags[flags.index("--out") + 1] if "--out" in flags else folder
    for path in (out, out / "result.json"):  # of a measurement, of a training
        if path.is_file():
            found["numbers"] = json.loads(path.read_text(encoding="utf-8"))
    return found


def run_limited(words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """Run a program for `LIMIT_S` at most and end all that it started; return exit code, output, errors."""
    with subprocess.Popen(
        words,
        cwd=folder,
        env=own_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            said, error = program.communicate(timeout=LIMIT_S)
            return program.returncode, said, error
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            said, error = program.communicate()
            return TOO_LONG, said, f"{error}\nended after {LIMIT_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def last_lines(text: str, most: int) -> str:
    """Return as many whole lines from the end as have at most so many characters."""
    text = text.strip()
    return text if len(text) <= most else text[-most:].partition("\n")[2]


def read_results(folder: Path, device: str, machine: dict[str, Any]) -> dict[str, Any]:
    """Read the results of earlier starts.

    Raises ProblemsError: they are from another machine, or the folder holds anything else, which steps of the
    same names would replace.
    """
    new = {"on": device, "accelerator": machine["accelerator"], "steps": {}}
    path = folder / "results.json"
    if not path.exists():
        new_output.new_directory("--folder", folder)
        return new
    kept: dict[str, Any] = files.read_json_object(path, MOST_BYTES)
    was, is_ = ((each.get("on"), each.get("accelerator")) for each in (kept, new))
    came = f"{path} is of {was}, and this is {is_}"
    rule = "one file is of one machine"
    if was == is_:
        steps = kept.get("steps")
        if isinstance(steps, dict) and all(
            "commands" in step for step in steps.values()
        ):
            return kept
        came = f"{path} has other fields than this command writes"
        rule = "its steps are gone on with"
    raise ProblemsError([Problem("--folder", came, rule, "name another --folder")])


def write_results(folder: Path, kept: dict[str, Any]) -> None:
    """Write all results as JSON and as text."""
    write_atomically(folder / "results.json", json.dumps(kept, indent=1) + "\n")
    text = [f"{kept['accelerator']}, {kept['on']}"]
    for name, step in kept["steps"].items():
        commands = (f"\n{command_text(each)}" for each in step["commands"])
        text.append(
            "\n".join(
                filter(None, (f"\n{name}: {step['title']}", step["goal"], *commands))
            )
        )
    write_atomically(folder / "results.txt", "\n".join(text) + "\n")


def command_text(found: dict[str, Any]) -> str:
    """Return a command with its outcome as text."""
    return f"{launch_lines.quoted(found['command'])}: {outcome_text(found)}"


def outcome_text(found: dict[str, Any]) -> str:
    """Return the outcome of a command as text."""
    outcome = f"{found['seconds']:.0f} s, exit code {found['code']}"
    return "\n".join(filter(None, (outcome, found["said"], found.get("error"))))
