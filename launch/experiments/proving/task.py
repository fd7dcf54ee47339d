"""One training of an adapter, and what its ranks found: the files between a command and its ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

OTHERS = 60.0  # seconds in which the other ranks come to where one is
INITIAL = "initial.safetensors"


@dataclass(frozen=True)
class Task:
    """A training under a layout.

    Attributes:
        out: new directory of what its ranks find.
        steps: optimizer steps, counted from the first one of a run that it resumes.
        initial: file of the weights to begin with; "": the model's own, which are written to `out`.
        reference: directory of the run to compare with; "": the tensors of this one are kept.
        bounds: by tensor, as of `key`, the difference that rounding explains.
        rounding: relative; > 0 perturbs the initial weights by it at random, drawn by `noise`.
        share: (index, number): of each global batch only this one of so many equal shares.
        done: steps of the run that is resumed, from `resumed`.
        checkpoint: where the adapter saves after the last step; "": nowhere.
        timeout: seconds that a step may take.
        given: to the adapter, as `proof.given`.
        ends: tensors are compared after the first and the last step alone.
    """

    adapter: str
    layout: str
    out: str
    steps: int
    accumulation: int = 1
    precision: str = "fp32"
    initial: str = ""
    reference: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    rounding: float = 0.0
    share: tuple[int, int] = (0, 1)
    seed: int = 1234
    noise: int = 0
    done: int = 0
    resumed: str = ""
    checkpoint: str = ""
    timeout: float = 300.0
    given: str = ""
    ends: bool = False


@dataclass(frozen=True)
class Fact:
    """A tensor of one rank next to that part of the reference's.

    Attributes:
        kind: "weight", "gradient", "buffer" or the name of a moment in the optimizer's state.
        difference: its L2 norm.
        across: L2 norm of what is no multiple of the reference's.
        expected: L2 norm of the reference's.
        largest: difference of an element.
    """

    step: int
    kind: str
    name: str
    difference: float
    across: float
    expected: float
    largest: float


@dataclass(frozen=True)
class Found:
    """What one rank found.

    Attributes:
        losses: by step.
        validations: losses on held-out text, by the number of steps before.
        norms: gradient norms by step, as the program says them.
        unknown: names of tensors that the reference has not.
        misfits: of tensors that are no part of the reference's, with both shapes.
        unread: moments that could not be read, and so are not compared.
        unasked: words of the layout that the adapter did not ask for.
    """

    facts: list[Fact] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    validations: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    unasked: list[str] = field(default_factory=list)


_FOUND = TypeAdapter(Found)
_TASKS = TypeAdapter(list[Task])


def key(step: int, kind: str, name: str) -> str:
    """Name a tensor of a step."""
    return f"{step}/{kind}/{name}"


def tensors_of(directory: str | Path, step: int) -> Path:
    """Return the file of a reference's tensors after a step, by kind and name."""
    return Path(directory) / f"step-{step}.safetensors"


def found_by(directory: str | Path, rank: int) -> Path:
    """Return the file of what a rank found; the tensors beyond their bounds lie beside it."""
    return Path(directory) / f"rank-{rank}.json"


def write_tasks(file: Path, tasks: list[Task]) -> None:
    """Write the tasks of one launch."""
    file.write_text(json.dumps([asdict(each) for each in tasks]))


def read_tasks(file: Path) -> list[Task]:
    """Read the tasks of one launch."""
    return _TASKS.validate_json(file.read_bytes())


def wait_for(files: Sequence[Path]) -> None:
    """Wait until each rank has written its file, at most `OTHERS` seconds."""
    late = time.monotonic() + OTHERS
    while time.monotonic() < late:
        if all(file.exists() and file.stat().st_size for file in files):
            break
        time.sleep(0.1)


def write_found(file: Path, found: Found) -> None:
    """Write what a rank found, whole or not at all."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(found)))
    part.rename(file)


def read_found(file: Path) -> Found:
    """Read what a rank found."""
    return _FOUND.validate_json(file.read_bytes())
