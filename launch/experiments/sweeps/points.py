"""Points of a sweep: an ordinary short run for each combination of values, in processes of its own.

    OUT/batch.micro=2-model.heads=8/   a run directory, with OUT/batch.micro=2-model.heads=8.log
    OUT/runs.json                      the settings that all points share
    OUT/sweep.md, .csv, .png           the outcome

A point whose outcome is known is not run again.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic as clock

from tqdm import tqdm

from ds_configs.plan import Machine
from ds_configs.resolver import resolve
from launch.console import launch_lines, numbers, terminal
from launch.experiments.launching import ROOT, run_and_wait, torchrun
from launch.experiments.sweeps.lines import Line, measured_line
from launch.planning.prediction.forecast import largest_number
from launch.planning.resolved_plans import processes
from launch.ranks.processes import device_limit
from launch.reports.runs import OOM, is_run, read_run
from recipes import catalog, key_paths
from recipes.problems import Problem, ProblemsError, counted
from recipes.schema import Recipe

LARGEST = "largest"  # in place of values: doubled until a point fails, then bisected
GROWING = ("batch.micro", "model.layers")
MOST = 2**16
OUTCOMES = ("ok", OOM, "diverged")  # another run would repeat them
SHORT = ("run.save_last=false", "run.save_every=0", "run.validate_every=0", "run.prompt=null")
Swept = Mapping[str, tuple[str, ...]]  # key -> its values, as typed


@dataclass(frozen=True)
class Point:
    """A combination of values, with the settings of its run. `refused`: what speaks against it."""

    values: tuple[str, ...]
    name: str
    settings: tuple[str, ...] = ()
    processes: int = 1
    refused: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """The swept keys, and what all points share.

    Attributes:
        base: the recipe without swept values.
        world: processes of each point; None: as many as its layout needs.
    """

    recipe: str
    base: Recipe
    swept: Swept
    settings: tuple[str, ...]
    tiny: bool
    steps: int | None
    world: int | None
    machine: Machine
    out: Path

    def combinations(self, largest: str = LARGEST) -> list[tuple[str, ...]]:
        """Return every combination of values, with another word for `LARGEST`."""
        values = ([largest if value == LARGEST else value for value in each] for each in self.swept.values())
        return list(itertools.product(*values))

    def point(self, values: Sequence[str]) -> Point:
        """Resolve a combination; its batch, data ranks and number of processes follow from it."""
        named = dict(zip(self.swept, values, strict=True))
        words = "-".join(f"{key}={value}" for key, value in named.items())
        name = re.sub(r"[^A-Za-z0-9._=-]", lambda odd: f"%{ord(odd[0]):x}", words)
        fixed = {setting.partition("=")[0].strip() for setting in self.settings} | {*named}
        short = tuple(setting for setting in SHORT if setting.partition("=")[0] not in fixed)
        settings = (*self.settings, *short, *(f"{key}={value}" for key, value in named.items()))

        def number(key: str, stated: int | None) -> int:
            return int(named[key]) if named.get(key, "").isdecimal() else stated or 0

        parallel, batch, moved = (
            self.base.parallel,
            self.base.batch,
            {"parallel.tp", "parallel.pp"} & {*named},
        )
        tp, pp = number("parallel.tp", parallel.tp or 1), number("parallel.pp", parallel.pp or 1)
        dp, model_parallel = number("parallel.dp", parallel.dp), max(1, tp * pp)
        world = self.world or model_parallel * (dp or 1)
        if moved and "parallel.dp" not in fixed:
            world = self.world or (processes(self.base) if dp else model_parallel)
            dp, settings = 0, (*settings, "parallel.dp=null")
        micro = number("batch.micro", batch.micro)
        if micro and (moved or {"batch.micro", "parallel.dp"} & {*named}) and "batch.global" not in fixed:
            each = micro * (number("batch.accumulation", batch.accumulation) or pp)
            settings += (f"batch.global={each * (dp or max(1, world // model_parallel))}",)
        try:
            recipe = catalog.load(self.recipe, settings, tiny=self.tiny, steps=self.steps)
            limit = device_limit()
            if limit is not None and world > limit:
                came, rule = counted(world, "process"), f"each needs a device, and this machine has {limit}"
                raise ProblemsError([Problem("parallel", came, rule)])
            resolve(recipe, recipe.ds_config, world, self.machine)
        except ProblemsError as error:
            return Point(tuple(values), name, refused=error.problems)
        return Point(tuple(values), name, settings, world)

    def run(self) -> Iterator[Line]:
        """Run every point that has no outcome yet, and yield the lines; for `LARGEST` as many as it takes."""
        began, combinations = clock(), self.combinations()
        for number, values in enumerate(combinations, start=1):
            if LARGEST not in values:
                yield self.make(self.point(values))
            else:
                yield from self._search(values)
            left = (clock() - began) / number * (len(combinations) - number)
            if left > 1:
                terminal.say(f"{number} of {len(combinations)}, about {tqdm.format_interval(left)} left")

    def _search(self, values: Sequence[str]) -> list[Line]:
        lines: list[Line] = []

        def fits(number: int) -> bool:
            chosen = [str(number) if value == LARGEST else value for value in values]
            lines.append(self.make(self.point(chosen)))
            return lines[-1].status == "ok"

        largest_number(fits, MOST)
        return lines

    def make(self, point: Point) -> Line:
        """Return the outcome of a point; run it if it is not known."""
        took = ""
        if point.refused:
            line = Line(point.values, "refused", note="; ".join(map(str, point.refused)))
        elif (known := self._read(point)) and known.status in OUTCOMES:
            line = known
        else:
            began, code = clock(), self._launch(point)
            found = self._read(point)
            if not found or found.status not in OUTCOMES:
                log = self.out / f"{point.name}.log"
                said = [each for each in log.read_text(errors="replace").splitlines() if each.strip()]
                why = f"exit code {code}: {said[-1].strip() if said else 'no word'} ({log})"
                found = Line(point.values, "refused" if code == 2 else "failed", note=why)
            line, took = found, f", took {tqdm.format_interval(clock() - began)}"
        rate = f", {numbers.number(line.samples_per_s)} samples/s" if line.samples_per_s else ""
        terminal.say(f"{point.name}: {line.status}{rate}{took}")
        return line

    def _read(self, point: Point) -> Line | None:
        directory = self.out / point.name
        if not is_run(directory):
            return None
        return measured_line(point.values, read_run(directory, point.name, lambda name: None), self.base)

    def _launch(self, point: Point) -> int:
        launcher = torchrun(point.processes) if point.processes > 1 else [sys.executable]
        words = ["--recipe", self.recipe, *(word for each in point.settings for word in ("--set", each))]
        words += ["--tiny"] * self.tiny + (["--steps", str(self.steps)] if self.steps else [])
        where = ["--out", str(self.out / point.name), "--resume"]
        script = str(ROOT / launch_lines.SCRIPT)
        return run_and_wait([*launcher, script, *words, *where], self.out / f"{point.name}.log")


def swept_keys(texts: Sequence[str], settings: Sequence[str]) -> Swept:
    """Read texts such as batch.micro=1,2,4 or batch.micro=largest. Raises ProblemsError."""
    found, problems = dict[str, tuple[str, ...]](), list[Problem]()
    fixed = {setting.partition("=")[0].strip() for setting in settings}
    for text in texts:
        key, _, written = (part.strip() for part in text.partition("="))
        values = tuple(value.strip() for value in re.split(r",(?![^\[{]*[\]}])", written))
        rule, fix = "", "as in --sweep batch.micro=1,2,4"
        if key not in key_paths.paths():
            rule, fix = "no such key", key_paths.suggestion(key.split("."))
        elif not all(values) or len({*values}) < len(values):
            rule = "it takes values, separated by commas, each once"
        elif LARGEST in values and (len(values) > 1 or key not in GROWING):
            rule, fix = f"it stands alone, for {' or '.join(GROWING)}", "name values"
        elif key in found or key in fixed:
            rule, fix = f"{key} is given twice", "leave one out"
        if rule:
            problems.append(Problem("--sweep", f"--sweep {text}", rule, fix))
        found[key] = values
    if sum(LARGEST in values for values in found.values()) > 1:
        rule = "one key at a time is made as large as it can be"
        problems.append(Problem("--sweep", f"{LARGEST} twice", rule, "name values for one of them"))
    if problems:
        raise ProblemsError(problems)
    return found
