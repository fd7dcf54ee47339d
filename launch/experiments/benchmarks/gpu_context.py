"""What a step of `benchmark.py gpu` has at hand, and what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from launch.experiments.benchmarks import step_speed, step_text
from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.step_speed import RATE, Measured, Pace
from launch.experiments.benchmarks.turns import ROOT
from recipes import catalog

T = TypeVar("T")
PACE, WALK = Pace(3, 5, 5, apart=True), Pace(1, 1, 1, apart=True)
PACKAGED = ("data.source=packaged", "data.validation_every=20")
LARGE_SIZES = ("batch.", "model.heads")  # settings that no tiny recipe takes


@dataclass(frozen=True)
class Goal:
    """What was hoped for, and what came: at least `least` of `what`. None: it could not be measured."""

    what: str
    least: float
    measured: float | None

    def __str__(self) -> str:
        came = "not measured" if self.measured is None else f"measured {self.measured:.3g}"
        verdict = "" if self.measured is None else ", reached" if self.measured >= self.least else ", missed"
        return f"goal: {self.what} at least {self.least:g}: {came}{verdict}"


@dataclass(frozen=True)
class Outcome:
    """Of one step: all numbers, and what is shown of them."""

    found: Any
    said: str
    goals: tuple[Goal, ...] = ()


class CannotRunHere(Exception):
    """A step that this machine cannot take; the message says why."""


@dataclass(frozen=True)
class Context:
    """`device`: "cuda", or "cpu" for a walk through all steps on tiny shapes, which measures nothing."""

    device: str
    folder: Path
    say: Callable[[str], None] = field(repr=False)

    @property
    def walks(self) -> bool:
        return self.device == "cpu"

    def few(self, many: Sequence[T]) -> Sequence[T]:
        """All of them on a GPU, two in a walk."""
        return many[:2] if self.walks else many

    def only_on_gpu(self, why: str) -> None:
        """Raise CannotRunHere in a walk."""
        if self.walks:
            raise CannotRunHere(why)

    def spec(
        self, name: str, recipe: str, *settings: str, system: str = "ours", **more: Any
    ) -> Specification:
        """In one process; of fp16 emulated on a CPU."""
        fp16 = self.walks and "precision=fp16" in settings
        return Specification(name, system, recipe, settings, self.walks, emulate_fp16=fp16, **more)

    def alone(self, recipe: str, *more: str) -> tuple[str, ...]:
        """Settings that train a row in one process on the packaged corpus, its micro-batch kept."""
        row = catalog.load(recipe, tiny=self.walks)
        if self.walks:
            more = tuple(each for each in more if not each.startswith(LARGE_SIZES))
        keys = {setting.partition("=")[0] for setting in more}
        data = ("data.blend=[]", *PACKAGED) if row.data.blend else PACKAGED
        own: tuple[str, ...] = () if row.data.source == "packaged" and not row.data.blend else data
        batch = (f"batch.global={row.batch.micro}", "batch.accumulation=null")
        own += batch if "batch.global" not in keys and row.batch.micro else ()
        return ("parallel.tp=1", "parallel.pp=1", "parallel.dp=1", *own, *more)

    def measure(self, specs: Sequence[Specification], traced: bool = False) -> list[Measured]:
        """One after the other, the machine's rate with the shapes of the first as the last."""
        first = specs[0]
        rate = Specification(RATE, RATE, first.recipe, first.settings, first.tiny, first.ds_config)
        if not first.emulate_fp16:
            specs = [*specs, rate]
        folder = self.folder / "traces" if traced else None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        return step_speed.measure(specs, WALK if self.walks else PACE, self.say, folder)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """One of our commands, or a module."""
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
        how: dict[str, Any] = dict(cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, **how)

    def pretrain(self, out: Path, settings: Sequence[str], *flags: str) -> subprocess.CompletedProcess[str]:
        """A run of pretrain.py without a sample at its end."""
        given = [part for each in (*settings, "run.prompt=null") for part in ("--set", each)]
        tiny = ["--tiny"] if self.walks else []
        return self.run("launch/pretrain.py", *flags, *tiny, *given, "--out", str(out))


def speeds(measured: Sequence[Measured], goals: Sequence[Goal] = ()) -> Outcome:
    """The usual outcome: a table, where the time goes, and who failed."""
    rows = step_speed.summarised(measured)
    failed = [f"{each.spec.name}: {each.failed}" for each in measured if each.failed]
    found = {"rows": [asdict(row) for row in rows], "measured": [asdict(each) for each in measured]}
    if not rows:
        return Outcome(found, "\n".join(failed), tuple(goals))
    parts = [step_text.rates(measured), step_text.speeds(rows, rows[0].name), step_text.parts(measured)]
    return Outcome(found, "\n\n".join([*parts, *failed]), tuple(goals))
