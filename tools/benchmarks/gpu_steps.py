"""The steps of `benchmark.py gpu`, which tools/gpu.yaml lists."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import yaml

LIST = Path(__file__).resolve().parents[1] / "gpu.yaml"
Command = tuple[str, ...]  # a file of this repository and its flags
TRAIN = "launch/pretrain.py"
MEASURE = "tools/benchmark.py"
PACE = ("--blocks=3", "--steps=5", "--warm_up=5")
WALK = ("--blocks=1", "--steps=1", "--warm_up=1")


class GpuStep(NamedTuple):
    """Commands that answer one question. `goal`: what their numbers should reach."""

    name: str
    title: str
    commands: Sequence[Command]
    goal: str = ""


def read(path: Path = LIST) -> tuple[GpuStep, ...]:
    """Read the steps from the list of commands."""
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    steps = []
    for entry in content["steps"]:
        lines = [
            Template(line).substitute(content["words"]) for line in entry["commands"]
        ]
        commands = [tuple(shlex.split(line)) for line in lines]
        steps.append(
            GpuStep(entry["name"], entry["title"], commands, entry.get("goal", ""))
        )
    return tuple(steps)


STEPS = read()


def tiny(command: Command) -> Command:
    """Change a training or measurement to tiny shapes, in a precision that any machine has."""
    if command[0] not in (TRAIN, MEASURE):
        return command
    large = ("--set=batch.", "--set=model.heads", "--set=precision")
    kept = [word for word in command if not word.startswith(large) and word not in PACE]
    own: Sequence[str] = WALK
    if command[0] == TRAIN:
        own = ["--emulate_fp16"] if any("fp16" in word for word in command) else []
    return (
        *kept,
        *own,
        "--tiny",
        "--set=precision=auto",
        "--set=batch.accumulation=null",
    )
