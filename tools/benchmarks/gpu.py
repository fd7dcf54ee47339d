"""`benchmark.py gpu`: the commands that tools/gpu.yaml lists, each with its limit, and what came of them."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import psutil
import yaml

from launch.console import arguments, new_output, terminal, text_table
from launch.experiments.launching import ROOT, own_environment
from recipes.problems import ProblemsError
from tools.benchmarks.results import Column, Row

LIST = Path(__file__).resolve().parents[1] / "gpu.yaml"
TRAIN = "launch/pretrain.py"
MEASURE = "tools/benchmark.py"
WALK = ("--blocks=1", "--steps=1", "--warm_up=1")
# flags of a large machine
LARGE = tuple(f"--set={key}" for key in ("batch.", "model.heads", "precision"))
LARGE += tuple(word.partition("=")[0] + "=" for word in WALK)
TINY = ("--tiny", "--set=precision=auto", "--set=batch.accumulation=null")
LIMIT_S = 300  # of a command without one of its own
# exit codes as of a shell, and of timeout(1)
MISSING = 127
TOO_LONG = 124
LEAST_S = 5  # with less time left a command is not run
MOST_SAID = 8000  # characters of output
MOST_SHOWN = 60  # of a command in the table
MOST_OF_TRAINING = 4000  # of a training, which ends with its result

EXAMPLES = """\
examples:
  python tools/benchmark.py gpu
      everything that one GPU can tell, in commands of five minutes at most
  python tools/benchmark.py gpu --only fifteen-1
      what a GPU lent for minutes should say first; fifteen-2 is for the next
      call, and each keeps to its own time
  python tools/benchmark.py gpu --minutes 9 --only 1.2b attention
      two steps, ended nine minutes from now
  python tools/benchmark.py gpu --on cpu --folder runs/walk
      every step on tiny shapes: shows that they work, and measures nothing

tools/gpu.yaml lists the steps and their commands. results.json in --folder has
hardware, versions, commands, goals and all numbers, written after each."""

RULES = (("--list", "*", "it lists the steps and ends"),)
TABLE = (
    Column("step", "step"),
    Column("s", "seconds", "{:.0f}"),
    Column("share", "share", "{:.0%}"),
    Column("limit", "limit_s"),
    Column("exit code", "code"),
    Column("command", "command", f"{{:.{MOST_SHOWN}}}"),
)


class Command(NamedTuple):
    """A program with its flags: a file of this repository or, without ending, of the machine.

    `limit_s`: the most seconds that it may take.
    """

    words: tuple[str, ...]
    limit_s: int


class GpuStep(NamedTuple):
    """Commands that answer one question.

    `goal`: what their numbers should reach. `minutes`: the time for all; such a step is run by name only.
    """

    name: str
    title: str
    commands: Sequence[Command]
    goal: str = ""
    minutes: int = 0


def read(path: Path = LIST) -> dict[str, GpuStep]:
    """Read the steps from the list of commands, by name; one with a limit of its own is {seconds: command}."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = {}
    for entry in content["steps"]:
        commands = []
        for given in entry.pop("commands"):
            own = given if isinstance(given, dict) else {LIMIT_S: given}
            ((limit_s, line),) = own.items()
            words = shlex.split(Template(line).substitute(content["words"]))
            commands.append(Command(tuple(words), limit_s))
        steps[entry["name"]] = GpuStep(commands=commands, **entry)
    return steps


STEPS = read()


def tiny(command: Command) -> Command:
    """Change a command to one for any machine: tiny shapes, in a precision that it has, and time."""
    words = command.words
    if words[0] == "nvidia-smi":
        return Command(("lscpu",), LIMIT_S)
    if words[0] not in (TRAIN, MEASURE):
        return command
    own: Sequence[str] = WALK
    if words[0] == TRAIN:
        own = ["--emulate_fp16"] if any("fp16" in word for word in words) else []
    kept = [word for word in words if not word.startswith(LARGE)]
    return Command((*kept, *own, *TINY), LIMIT_S)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is measured").add_argument
    add(
        "--only",
        nargs="+",
        choices=STEPS,
        metavar="STEP",
        help="only these steps (default: all but fifteen)",
    )
    add("--list", action="store_true", help="list the steps and exit")
    add(
        "--on",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: tiny shapes, to try the steps",
    )
    add(
        "--minutes",
        type=arguments.whole(most=10**5),
        metavar="N",
        help="end this start after so long, and name what was not run (default: the steps' own)",
    )
    add(
        "--folder",
        default=time.strftime("runs/gpu-%Y%m%d-%H%M%S"),
        metavar="DIR",
        help="new, of results.json, traces and runs (default: runs/gpu-DATE-TIME)",
    )
    parser.set_defaults(out=None)


def rows(args: argparse.Namespace, machine: dict[str, Any]) -> Iterator[Row]:
    """Run the commands of the steps, and yield what came of each. Raises ValueError."""
    if args.list:
        print(text_table.table((step.name, step.title) for step in STEPS.values()))
        return
    if args.on == "cuda" and not machine["accelerators"]:
        came = "benchmark.py gpu without a GPU"
        fix = "--on cpu walks through the steps on tiny shapes"
        raise ProblemsError.of("--on", came, "its steps measure one", fix)
    folder = new_output.new_directory("--folder", args.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    args.out = folder / "results.json"
    # as Ctrl-C, it ends the running command, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    usual = [name for name, step in STEPS.items() if not step.minutes]
    steps = [STEPS[name] for name in args.only or usual]
    minutes = args.minutes or sum(step.minutes for step in steps)
    end = psutil.Process().create_time() + 60 * (minutes or 10**5)
    outcomes = []
    for step in steps:
        terminal.say("\n".join(filter(None, ("", step.name, step.title, step.goal))))
        for number, command in enumerate(step.commands, 1):
            given = tiny(command) if args.on == "cpu" else command
            place = folder / step.name / str(number)
            outcomes.append({"step": step.name, **outcome(given, place, end)})
            yield outcomes[-1]
    whole = sum(row["seconds"] for row in outcomes) or 1.0
    for row in outcomes:
        row["share"] = row["seconds"] / whole


def outcome(command: Command, place: Path, end: float) -> Row:
    """Run a command in a new folder until its limit, or the `end` of all; return what came of it."""
    line = shlex.join(command.words)
    row: Row = {"command": line, "limit_s": command.limit_s, "seconds": 0.0}
    terminal.say(f"\n{line}")
    left_s = end - time.time()
    if left_s < LEAST_S:
        terminal.say("not run: the time is over")
        return {**row, "code": "not run"}
    place.mkdir(parents=True)
    began = time.monotonic()
    row["code"], said, error = run_limited(
        command.words, place, min(command.limit_s, left_s)
    )
    row["seconds"] = time.monotonic() - began
    most = MOST_OF_TRAINING if command.words[0] == TRAIN else MOST_SAID
    row["said"] = last_lines(said, most)
    if row["code"]:
        row["error"] = last_lines(error, MOST_SAID)
    if "--out" in command.words:
        out = place / command.words[command.words.index("--out") + 1]
        for path in (out, out / "result.json"):  # of a measurement, of a training
            if path.is_file():
                row["numbers"] = json.loads(path.read_text(encoding="utf-8"))
    terminal.say(f"{row['seconds']:.0f} s, exit code {row['code']}")
    terminal.say(f"{row['said']}\n{row.get('error', '')}".strip())
    return row


def run_limited(
    words: Sequence[str], folder: Path, limit_s: float
) -> tuple[int, str, str]:
    """Run a program for so long at most and end all that it started; return exit code, output, errors."""
    if words[0].endswith(".py"):
        words = [sys.executable, str(ROOT / words[0]), *words[1:]]
    if not shutil.which(words[0]):
        return MISSING, "", f"there is no {words[0]}"
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
            said, error = program.communicate(timeout=limit_s)
            return program.returncode, said, error
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            said, error = program.communicate()
            return TOO_LONG, said, f"{error}\nended after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def last_lines(text: str, most: int) -> str:
    """Return as many whole lines from the end as have at most so many characters."""
    text = text.strip()
    return text if len(text) <= most else text[-most:].partition("\n")[2]
