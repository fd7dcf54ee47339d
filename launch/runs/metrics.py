"""The records of a run, one line of metrics.jsonl each: optimizer steps, validations and notes.

A step's number counts completed optimizer steps: the first step is 1, and 0 means "before training". Numbers
that are not finite (the gradient norm of an overflowed fp16 step) are null, since JSON has no infinity.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from data.durable_files import write_atomically

PART_NAMES = dict(
    mlm_loss="masked tokens", sentence_loss="sentence objective", sentence_accuracy="sentence accuracy"
)
MOST_NAMED = 5  # broken lines of one file

Finite = Annotated[float, Field(allow_inf_nan=False)]
Parts = dict[str, Finite | None]  # of a loss, by the names of PART_NAMES


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One completed optimizer step. Fields with a default may be missing in files of earlier versions.

    Attributes:
        loss: nats per token, mean over the global batch; None: not finite.
        skipped: the loss scaler threw the update away.
        seconds: wall time of the step, of which `data_seconds` were spent waiting for the batch.
        launch_step: the step's number within its launch, from 1.
        peak_memory_bytes: rank 0's peak so far, counted as `memory_kind` says
            (`launch.machine.memory.peak_memory`).
        samples_per_s, tokens_per_s: over all ranks; tflops, exact_tflops: per rank.
        time: seconds since the epoch.
    """

    step: int
    loss: Finite | None
    skipped: bool
    seconds: Finite
    launch_step: int
    peak_memory_bytes: int
    memory_kind: str
    lr: Finite | None = None
    grad_norm: Finite | None = None
    loss_scale: Finite | None = None
    data_seconds: Finite = 0.0
    samples_per_s: Finite | None = None
    tokens_per_s: Finite | None = None
    tflops: Finite | None = None
    exact_tflops: Finite | None = None
    parts: Parts = field(default_factory=dict)
    time: float = 0.0
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """The loss on held-out text (nats per token) after `step` steps; `kind` "test": on the test split."""

    step: int
    loss: Finite | None
    parts: Parts = field(default_factory=dict)
    time: float = 0.0
    kind: Literal["validation", "test"] = "validation"


@dataclass(frozen=True, slots=True)
class Note:
    """A line of text that was said after `step` steps."""

    step: int
    text: str
    time: float = 0.0
    kind: Literal["note"] = "note"


Record = StepRecord | ValidationRecord | Note
_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "step": TypeAdapter(StepRecord),
    "validation": TypeAdapter(ValidationRecord),
    "test": TypeAdapter(ValidationRecord),
    "note": TypeAdapter(Note),
}


@dataclass(frozen=True)
class Records:
    """What a metrics.jsonl holds, each kind in the order of the file. `broken`: lines were left out."""

    steps: tuple[StepRecord, ...] = ()
    validations: tuple[ValidationRecord, ...] = ()
    tests: tuple[ValidationRecord, ...] = ()
    notes: tuple[Note, ...] = ()
    broken: bool = False

    def __len__(self) -> int:
        return len(self.steps) + len(self.validations) + len(self.tests) + len(self.notes)

    @property
    def part(self) -> str:
        """The loss that is per token: "mlm_loss" of a BERT, whose other part is not; else "loss"."""
        every = (*(step.parts for step in self.steps), *(each.parts for each in self.validations))
        return "mlm_loss" if any("mlm_loss" in parts for parts in every) else "loss"


def curve(records: Sequence[StepRecord | ValidationRecord], part: str = "loss") -> list[tuple[int, float]]:
    """(step, nats) of the records whose loss, or part of it, is finite."""
    found = ((record.step, record.loss if part == "loss" else record.parts.get(part)) for record in records)
    return [(step, value) for step, value in found if value is not None]


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def finite_parts(parts: Mapping[str, float]) -> Parts:
    return {name: finite(value) for name, value in parts.items()}


def to_line(record: Record) -> str:
    """The record as a line of JSON, the parts of a loss next to it."""
    values = dataclasses.asdict(record)
    first = {key: values.pop(key) for key in ("kind", "step", "loss") if key in values}
    return json.dumps({**first, **values.pop("parts", {}), **values}, allow_nan=False) + "\n"


def from_line(line: str | bytes) -> Record:
    """Raises ValueError with what is wrong with the line."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not a line of metrics ({error})") from None
    kind = values.get("kind") if isinstance(values, dict) else None
    if kind not in _ADAPTERS or not isinstance(values.get("step"), int):
        raise ValueError("not a record of metrics, which has a kind and a step")
    values["parts"] = {name: values[name] for name in PART_NAMES if name in values}
    try:
        record: Record = _ADAPTERS[kind].validate_python(values)
        return record
    except ValidationError as error:
        raise ValueError(f"{kind} {values['step']} {_wrong(error)}") from None


def read_metrics(path: Path, problems: list[str] | None = None) -> Records:
    """The records of a metrics.jsonl; none where there is no file. A torn last line is dropped.

    With `problems`, broken lines are left out and named there, at most `MOST_NAMED` of them.

    Raises:
        ValueError: a broken line elsewhere, without `problems`.
    """
    found: dict[str, list[Any]] = {kind: [] for kind in _ADAPTERS}
    broken = []
    for number, line in enumerate(_whole_lines(path), start=1):
        try:
            record = from_line(line)
        except ValueError as error:
            broken.append(f"{path}:{number}: {error}")
            if problems is None:
                raise ValueError(f"{broken[0]}: delete that line, or restore the file") from None
        else:
            found[record.kind].append(record)
    if problems is not None:
        left_out = "left out, with the other lines kept; delete that line, or restore the file"
        problems += [f"{each}: {left_out}" for each in broken[:MOST_NAMED]]
        if (more := len(broken) - MOST_NAMED) > 0:
            problems.append(f"{path}: {more} more lines like these")
    steps, validations, tests, notes = (tuple(found[kind]) for kind in ("step", "validation", "test", "note"))
    return Records(steps, validations, tests, notes, bool(broken))


def truncate(path: Path, step: int) -> None:
    """Keep what was recorded up to and including `step` completed optimizer steps; 0: nothing.

    A resumed run repeats the steps after its checkpoint; their old lines, and the torn line that a killed
    process may leave, would otherwise stand next to the new ones.
    """
    if path.exists():
        kept = [line for line in _whole_lines(path) if step and from_line(line).step <= step]
        write_atomically(path, "".join(f"{line.decode()}\n" for line in kept))


def _whole_lines(path: Path) -> list[bytes]:
    """The lines without what a killed process could not finish."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _wrong(error: ValidationError) -> str:
    """The fields that are missing, or else the first that is wrong."""
    missing = [str(each["loc"][0]) for each in error.errors() if each["type"] == "missing"]
    if missing:
        return f"has no {', '.join(missing)}"
    first = error.errors()[0]
    return f"has {first['loc'][-1]}={first['input']!r}, which is no such value"
