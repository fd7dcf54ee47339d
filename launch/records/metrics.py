"""The records of a run, one line of metrics.jsonl each: launches, steps, validations, saves and notes.

A step's number counts completed optimizer steps: the first step is 1, and 0 means "before training". Numbers
that are not finite (the gradient norm of an overflowed fp16 step) are null, since JSON has no infinity.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from data.durable_files import write_atomically
from ds_configs.plan import Plan
from launch.records.facts import (
    Finite,
    Judgement,
    Parts,
    RunFacts,
    SaveOutcome,
    StepRecord,
)
from modeling import cost
from recipes import files
from recipes.families import MASKED_FIGURES, TASK_FIGURES, LossFigure, parts_of
from recipes.layout import Layout
from recipes.schema import Branch

PARTS = (*parts_of(MASKED_FIGURES["nsp"]), *parts_of(TASK_FIGURES))
# What a line of metrics.jsonl says of every step.
STEP_KEYS = (
    "loss",
    "skipped",
    "seconds",
    "launch_step",
    "peak_memory_bytes",
    "memory_kind",
)
START_PARTS = (
    "launcher",
    "imports",
    "data",
    "records",
    "engine",
    "weights",
    "first_step",
)
MOST_NAMED = 5  # broken lines of one file in a report
MOST_LINE = 2**20  # bytes


@dataclass(frozen=True, slots=True)
class ValidationRecord:
    """The loss on held-out text, as of a step, after `step` steps; `kind` "test": on the test split."""

    step: int
    loss: Finite | None
    parts: Parts = field(default_factory=dict)
    time: float = 0.0
    kind: Literal["validation", "test"] = "validation"
    judgement: Judgement | None = None  # None: no reference curve is known


@dataclass(frozen=True, slots=True)
class Note:
    """A line of text after `step` steps."""

    step: int
    text: str
    time: float = 0.0
    kind: Literal["note"] = "note"


@dataclass(frozen=True)
class SpeedSettings:
    """The settings that decide the speed of a launch: times under other settings are not mixed."""

    ds_config: str
    layout: Layout
    zero_stage: int
    offload: str
    precision: str
    activation_checkpointing: str | int
    implementation: str
    hardware: str
    sequence_parallel: bool = False

    @classmethod
    def of(cls, run: RunFacts) -> SpeedSettings:
        plan = run.plan
        recipe = plan.recipe
        return cls(
            plan.ds_name,
            plan.layout,
            plan.zero_stage,
            plan.offload,
            plan.precision,
            recipe.activation_checkpointing,
            recipe.model.implementation,
            run.hardware,
            recipe.parallel.sequence,
        )

    def __str__(self) -> str:
        at = self.layout
        degrees = at.degrees(self.sequence_parallel)
        return (
            f"{self.ds_config}: {degrees}, micro-batch {at.micro}, "
            f"ZeRO-{self.zero_stage}, offload {self.offload}, {self.precision}, activation checkpointing "
            f"{self.activation_checkpointing}, {self.implementation}, on {self.hardware}"
        )


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """The begin of a launch after `step` steps."""

    step: int
    how: SpeedSettings
    time: float = 0.0
    kind: Literal["launch"] = "launch"


@dataclass(frozen=True, slots=True)
class StartRecord:
    """The parts of a launch in seconds on rank 0, up to the end of its first optimizer step."""

    step: int
    launcher: Finite  # until deepspeed or torchrun had started this process
    # of the libraries, with the checks of recipe, configuration and run directory
    imports: Finite
    # vocabulary and tokens, from the cache or new; choice of the checkpoint to resume
    data: Finite
    records: Finite  # the plan on the screen and the files of the run
    engine: Finite  # weights, DeepSpeed's engine, compiled ops
    weights: Finite  # a checkpoint loaded, or the initial weights validated
    first_step: Finite  # with its batch
    compiling: Finite  # torch.compile; in no other part
    time: float = 0.0
    kind: Literal["start"] = "start"

    @property
    def seconds(self) -> float:
        """Seconds from the launch to the end of the first step, without torch.compile."""
        return math.fsum(getattr(self, part) for part in START_PARTS)

    def __str__(self) -> str:
        named = {
            "weights": "checkpoint" if self.step > 1 else "first validation",
            "first_step": "first step",
        }
        shown = ", ".join(
            f"{named.get(part, part)} {getattr(self, part):.1f}" for part in START_PARTS
        )
        apart = (
            f"; besides, {self.compiling:.1f} s of compiling" if self.compiling else ""
        )
        return f"{self.seconds:.1f} s from launch to first step: {shown}{apart}"


@dataclass(frozen=True, slots=True)
class BranchRecord:
    """The place where a run left another one, after `step` steps; the records before are the other's."""

    step: int
    branch: Branch
    time: float = 0.0
    kind: Literal["branch"] = "branch"


Record = (
    BranchRecord
    | LaunchRecord
    | StartRecord
    | StepRecord
    | ValidationRecord
    | SaveOutcome
    | Note
)
# kinds of records that a branch takes along
OF_PARENT = ("branch", "launch", "step", "validation")
# Kind of a record -> its form, and its field in `Records`.
_KINDS: dict[str, tuple[TypeAdapter[Any], str]] = {
    "branch": (TypeAdapter(BranchRecord), "branches"),
    "launch": (TypeAdapter(LaunchRecord), "launches"),
    "start": (TypeAdapter(StartRecord), "starts"),
    "step": (TypeAdapter(StepRecord), "steps"),
    "validation": (TypeAdapter(ValidationRecord), "validations"),
    "test": (TypeAdapter(ValidationRecord), "tests"),
    "save": (TypeAdapter(SaveOutcome), "saves"),
    "note": (TypeAdapter(Note), "notes"),
}


@dataclass(frozen=True)
class Records:
    """The content of a metrics.jsonl by kind, the last record of each step; `broken`: lines were left out."""

    steps: tuple[StepRecord, ...] = ()
    validations: tuple[ValidationRecord, ...] = ()
    tests: tuple[ValidationRecord, ...] = ()
    saves: tuple[SaveOutcome, ...] = ()
    notes: tuple[Note, ...] = ()
    broken: bool = False
    launches: tuple[LaunchRecord, ...] = ()
    starts: tuple[StartRecord, ...] = ()
    branches: tuple[BranchRecord, ...] = ()

    @property
    def own_steps(self) -> tuple[StepRecord, ...]:
        """The steps of this run alone, without those before it branched off."""
        first = self.branches[-1].step if self.branches else 0
        return tuple(step for step in self.steps if step.step > first)


@dataclass(frozen=True)
class Stretch:
    """Steps in a row under the same settings `how`; None: their line is broken."""

    how: SpeedSettings | None
    steps: tuple[StepRecord, ...]

    def __str__(self) -> str:
        first = self.steps[0].step
        last = self.steps[-1].step
        return f"steps {first} to {last}" if last > first else f"step {last}"


def stretches(records: Records) -> list[Stretch]:
    """Group the run's own steps by their settings, in order; launches without a step do not count."""

    def how(record: StepRecord) -> SpeedSettings | None:
        before = [each.how for each in records.launches if each.step < record.step]
        return before[-1] if before else None

    groups = itertools.groupby(records.own_steps, how)
    return [Stretch(made, tuple(steps)) for made, steps in groups]


def curve(
    records: Sequence[StepRecord | ValidationRecord], figure: LossFigure
) -> list[tuple[float, float]]:
    """Return (step, value) of the records with a finite figure."""
    values = ((record.step, figure.of(record)) for record in records)
    return [(step, value) for step, value in values if value is not None]


def rates(plan: Plan, seconds: float, samples: int | None = None) -> dict[str, Any]:
    """Return samples/s and tokens/s over all ranks, and TFLOPS per rank, of a step of so many seconds.

    `samples`: those of the step; None: the batch's.
    """
    recipe = plan.recipe
    samples = samples or plan.layout.global_batch
    published, exact = cost.tflops(
        recipe, plan.padded_vocab, samples, seconds, plan.layout.world
    )
    tokens = samples * recipe.model.sequences * recipe.sequence_length
    return dict(
        samples_per_s=samples / seconds,
        tokens_per_s=tokens / seconds,
        tflops=published,
        exact_tflops=exact,
    )


def to_line(record: Record) -> str:
    """Return the record as a line of JSON; the parts of a loss are keys of their own."""
    values = _KINDS[record.kind][0].dump_python(record, mode="json")
    first = {}
    for key in ("kind", "step", "loss"):
        if key in values:
            first[key] = values.pop(key)
    parts = values.pop("parts", {})
    line = json.dumps({**first, **parts, **values}, allow_nan=False)
    return f"{line}\n"


def from_line(line: bytes, where: str | Path, number: int) -> Record:
    """Parse the record in line `number` of the file `where`. Raises FileError."""
    values = files.parse_json(files.decode(line, where, number), where, number)
    told = values if isinstance(values, dict) else {}
    kind = str(told.get("kind"))
    step = told.get("step")
    came = ""
    if kind not in _KINDS or type(step) is not int or step < 0:
        came = "not a record of metrics, which has a kind and a step from 0"
    elif kind == "step" and not told.keys() >= {*STEP_KEYS}:
        missing_keys = [key for key in STEP_KEYS if key not in told]
        came = f"a step without {', '.join(missing_keys)}"
    if came:
        files.refuse(where, came, line=number)
    values["parts"] = {name: values[name] for name in PARTS if name in values}
    record: Record = files.checked(_KINDS[kind][0], values, where, number)
    return record


def read_metrics(path: Path, problems: list[str] | None = None) -> Records:
    """Read a metrics.jsonl; no records without a file. A torn last line is dropped.

    With `problems`, broken lines are left out, and at most `MOST_NAMED` of them are added to it. Without it
    a broken line or an unreadable file raises ValueError.
    """
    by_kind: dict[str, list[Any]] = {field: [] for _, field in _KINDS.values()}
    broken: list[files.FileError] = []
    for _, record in _parsed(path, broken):
        by_kind[_KINDS[record.kind][1]].append(record)
    if broken and problems is None:
        raise ValueError(f"{broken[0]}: delete that line, or restore the file")
    if problems is not None:
        problems += _left_out(path, broken)
    for once in ("steps", "validations", "tests"):
        last = {record.step: record for record in by_kind[once]}
        by_kind[once] = [last[step] for step in sorted(last)]
    return Records(
        broken=bool(broken), **{field: tuple(each) for field, each in by_kind.items()}
    )


def truncate(
    path: Path, step: int, problems: list[str], begins_after: int
) -> list[int]:
    """Drop broken lines and the records of later steps than `step`, or all for 0.

    A resumed run repeats the steps after its checkpoint: their old lines, and a torn last line, must not
    stand next to the new ones. Broken lines are kept in a copy of the file, and named in `problems`. Return
    the steps up to `step` without a record, as `missing`. Raises OSError.
    """
    broken: list[files.FileError] = []
    kept = []
    if step:
        kept = [each for each in _parsed(path, broken) if each[1].step <= step]
    if broken:
        copy = unused_name(path)
        shutil.copyfile(path, copy)
        problems += _left_out(path, broken)
        problems.append(f"the file with these lines is kept as {copy}")
    if path.exists():
        write_atomically(path, b"".join(line for line, _ in kept).decode())
    steps = (record for _, record in kept if isinstance(record, StepRecord))
    return missing(steps, step, begins_after)


def begin_branch(path: Path, branch: Branch) -> None:
    """Write the records of the other run up to the branch, and where it is. Raises OSError."""
    theirs = Path(branch.run) / path.name
    lines = []
    for line, record in _parsed(theirs, []):
        if record.kind in OF_PARENT and record.step <= branch.step:
            lines.append(line.decode())
    lines.append(to_line(BranchRecord(branch.step, branch, time.time())))
    write_atomically(path, "".join(lines))


def missing(steps: Iterable[StepRecord], last: int, begins_after: int) -> list[int]:
    """Return the steps from 1 to `last` without a record.

    `begins_after`: steps before the run's first one, of which there are records if another run of ours made
    them; an adopted run has none.
    """
    recorded = {record.step for record in steps}
    first = begins_after + 1
    if any(number < first for number in recorded):
        first = 1
    return [number for number in range(first, last + 1) if number not in recorded]


def unused_name(path: Path) -> Path:
    """Return an unused name next to `path` for older metrics, which are kept."""
    for number in itertools.count(1):
        name = path.with_name(f"metrics-before-{number}.jsonl")
        if not name.exists():
            break
    return name


def _parsed(
    path: Path, broken: list[files.FileError]
) -> Iterator[tuple[bytes, Record]]:
    """Yield each line with its record, without a torn last line; add the faults of others to `broken`."""
    if not path.exists():
        return
    try:
        for number, line in files.lines_of(path, MOST_LINE):
            try:
                if line.endswith(b"\n"):
                    yield line, from_line(line, path, number)
            except files.FileError as error:
                broken.append(error)
    # an unreadable file or too long a line ends the reading
    except files.FileError as error:
        broken.append(error)


def _left_out(path: Path, broken: Sequence[files.FileError]) -> list[str]:
    """Word the first `MOST_NAMED` broken lines, and count the others."""
    what = "left out, with the other lines kept; delete that line, or restore the file"
    said = [f"{each}: {what}" for each in broken[:MOST_NAMED]]
    more = len(broken) - MOST_NAMED
    return [*said, f"{path}: {more} more lines like these"] if more > 0 else said
