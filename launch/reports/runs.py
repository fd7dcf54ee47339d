"""Find run directories and read them for a report: complete, unfinished, or with broken files."""

from __future__ import annotations

import contextlib
import glob
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from ds_configs.plan import Plan
from launch.evaluation import pretrained
from launch.evaluation.pretrained import Pretrained
from launch.evaluation.scores import Score, read_scores
from launch.ranks.ending import out_of_memory_reason
from launch.records.deviations import Deviation
from launch.records.directory import Launch, RunDirectory, row_of
from launch.records.facts import Ending, RunFacts
from launch.records.metrics import Records, curve, read_metrics
from launch.records.result import Result, make_result, read_result
from launch.records.titles import title_of
from recipes.files import check_names
from recipes.key_paths import flatten
from recipes.problems import Problem, ProblemsError, did_you_mean, some
from recipes.schema import Recipe

Points = list[tuple[float, float]]
Over = Literal["steps", "tokens", "hours"]  # what a curve is drawn over
T = TypeVar("T")

# A directory with any of these files is a run, complete or not.
RUN_FILES = ("recipe.yaml", "result.json", "metrics.jsonl")
WHAT_A_RUN_HOLDS = "a run directory holds recipe.yaml, metrics.jsonl and, once it has ended, result.json"
REMEDY = "restore it, or leave this run out"
UNFINISHED = "unfinished"
UNREADABLE = "unreadable"
OOM = "OOM"


@dataclass(frozen=True)
class ReportedRun:
    """The contents of a run directory.

    Attributes:
        name: its recipe, table/row, without "-tiny".
        result: for an unfinished run made from its metrics; empty where the files do not suffice.
        plan, launch: of the newest launch; None if unreadable.
        scores: from scores.json, written by launch/score.py.
        pretrained: the pretraining run of a fine-tuning run's weights; None without one.
        records: the lines of metrics.jsonl.
    """

    path: Path
    label: str
    name: str
    result: Result
    plan: Plan | None
    launch: Launch | None
    problems: tuple[str, ...]
    scores: tuple[Score, ...] = ()
    pretrained: Pretrained | None = None
    records: Records = Records()

    @property
    def places(self) -> list[Path]:
        """Return where the run, and what it was made of, lay: absolute paths."""
        facts: dict[str, Any] = {
            "run": str(self.path.absolute()),
            "there": str(self.path.resolve()),
        }
        if self.launch:
            facts["weights"] = self.launch.initial_weights
        if self.recipe:
            facts["recipe"] = self.recipe.model_dump(mode="json")
        values = [str(value) for _, value in flatten(facts)]
        return [Path(value) for value in values if value.startswith("/")]

    @property
    def tiny(self) -> bool:
        return self.result.tiny

    @property
    def status(self) -> str:
        return "measured" if self.result.status == "ok" else self.result.status

    @property
    def recipe(self) -> Recipe | None:
        return self.plan.recipe if self.plan else None

    @cached_property
    def training(self) -> Points:
        """Return (step, nats) of the finite losses per predicted token or example."""
        return curve(self.records.steps, self.result.figures[0])

    @cached_property
    def validation(self) -> Points:
        """Return the same of held-out text."""
        return curve(self.records.validations, self.result.figures[0])

    def along(self, points: Points, over: Over) -> Points:
        """Place points of steps over the tokens read, or the hours of the steps, up to them.

        Returns no point over tokens where the recipe is unreadable.
        """
        if over == "steps":
            return points
        if over == "hours":  # also of the steps before a branch
            steps = self.records.steps
            ends = [record.step for record in steps]
            passed = [0.0, *itertools.accumulate(record.seconds for record in steps)]
            return [
                (passed[bisect_right(ends, step)] / 3600, value)
                for step, value in points
            ]
        recipe = self.recipe
        if recipe is None:
            return []
        of_sample = recipe.model.sequences * recipe.sequence_length
        return [
            (float(recipe.sizes.samples(int(step)) * of_sample), value)
            for step, value in points
        ]

    @property
    def title(self) -> str:
        """Return what was trained."""
        return title_of(self.recipe) if self.recipe else self.result.title

    @property
    def table(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def pretrained_table(self) -> str | None:
        """Return the table of the row that pretrained the weights."""
        return self.pretrained.recipe.rpartition("/")[0] if self.pretrained else None

    @property
    def started(self) -> datetime | None:
        if self.launch:
            with contextlib.suppress(ValueError):
                return datetime.strptime(self.launch.started, "%Y-%m-%dT%H:%M:%S%z")
        return None


def read_run(
    path: Path, label: str, original_of: Callable[[str], Recipe | None]
) -> ReportedRun:
    """Read all readable files of a run; add the others to its `problems`.

    `original_of` returns the current recipe of a name; it serves runs that wrote no deviations.
    """
    problems: list[str] = []
    at = RunDirectory(path)
    plan = _read(at.plan, problems)
    launches = _read(at.launches, problems)
    launch = launches[-1] if launches else None
    records = read_metrics(at.metrics_jsonl, problems)
    written = None
    if at.result_json.exists():
        written = _read(lambda: read_result(at.result_json), problems)
    if written and written.steps and not (records.steps or records.broken):
        lost = f"has no step, and result.json counts {written.steps:,}"
        problems.append(f"{at.metrics_jsonl}: {lost}: {REMEDY}")
    if launches == [] and at.environment_json.exists():
        problems.append(f"{at.environment_json}: names no launch: {REMEDY}")
    stated = written or launch
    tiny = stated is not None and stated.tiny
    name = row_of(stated.recipe, tiny) if stated else label
    oom = out_of_memory_reason(path)
    if written is None or _continued(records, written):
        # A resumed run keeps its old result.json until it ends again. It may resume from an earlier step.
        readable = written is not None or not at.result_json.exists()
        status = UNFINISHED if readable else UNREADABLE
        without_plan = UNREADABLE
        if oom:
            status = without_plan = OOM
        result = Result(name, without_plan, tiny=tiny, reason=oom)
        if plan and launch:
            known = RunFacts(
                plan,
                name,
                launch.machine,
                original_of(name),
                tiny,
                launch.emulated_fp16,
            )
            result = (
                _unfinished_result(known, records, Ending(status, oom), problems)
                or result
            )
    else:
        result = written
        # from a later launch that wrote no result
        if oom and result.status not in ("ok", OOM):
            every = (Deviation("status", OOM, is_=oom), *result.deviations)
            result = replace(result, status=OOM, reason=oom, deviations=every)
    if plan:  # an older result does not name its figures
        result = replace(result, figures=plan.recipe.model.figures)
    scores = _read(lambda: read_scores(path), problems) or ()
    before = _read(lambda: pretrained.read(path), problems)
    return ReportedRun(
        path,
        label,
        name,
        result,
        plan,
        launch,
        tuple(problems),
        scores,
        before,
        records,
    )


def _continued(records: Records, result: Result) -> bool:
    """Check whether the run continued after the result; with broken lines, fewer steps are no sign of it."""
    last = records.steps[-1].step if records.steps else result.steps
    return last > result.steps if records.broken else last != result.steps


def _unfinished_result(
    facts: RunFacts, records: Records, ending: Ending, problems: list[str]
) -> Result | None:
    """Make a result from the records so far; None if they or the machine's description are broken."""
    try:
        made = make_result(facts, records, ending)
    except KeyError as error:
        what = f"environment.json of {facts.name} does not describe the machine"
        problems.append(f"{what}, {error!r}: restore it")
        return None
    except ArithmeticError:
        problems.append(
            f"metrics.jsonl of {facts.name} has seconds or losses that no run has: restore it"
        )
        return None
    if ending.status != UNFINISHED:
        return made
    return replace(
        made, deviations=(Deviation("unfinished", is_=made.steps), *made.deviations)
    )


def _read(read: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return read()
    except (ValueError, OSError) as error:
        problems.append(f"{' '.join(str(error).split())}: {REMEDY}")
        return None


def find(arguments: Sequence[str]) -> list[Path]:
    """Return the run directories of `arguments`, in their order, each once.

    Raises:
        ProblemsError: every argument that leads to no run, one line each.
    """
    by_place: dict[Path, Path] = {}
    problems = []
    for argument in arguments:
        try:
            runs = list(_runs_of(argument))
            if not runs:
                problems.append(Problem(argument, f"{argument}: {_why_none(argument)}"))
        except OSError as error:  # a name too long, a directory that may not be read
            why = f"cannot be looked into ({error.strerror or error})"
            problems.append(
                Problem(
                    argument, f"{argument} {why}", fix="name directories you may read"
                )
            )
        else:
            for path in runs:
                by_place.setdefault(path.resolve(), path)
    if problems:
        raise ProblemsError(problems)
    check_names("run", by_place)
    return list(by_place.values())


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in RUN_FILES)


def _runs_of(argument: str) -> Iterator[Path]:
    path = Path(argument).expanduser()
    seen = set[Path]()
    matches = [str(path)]
    if not path.exists():
        matches = sorted(glob.glob(str(path), recursive=True))
    for match in map(Path, matches):
        if match.is_dir():
            yield from _below(match, seen)


def _why_none(argument: str) -> str:
    path = Path(argument).expanduser()
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir())
        held = f"it holds {some(names, 3)}" if names else "it is empty"
        return (
            f"neither it nor a directory below it is a run ({held}): {WHAT_A_RUN_HOLDS}"
        )
    if path.exists():
        return f"it is a file: give the directory of a run; {WHAT_A_RUN_HOLDS}"
    if glob.has_magic(argument):
        return f"no run directory matches; {WHAT_A_RUN_HOLDS}"
    hint = WHAT_A_RUN_HOLDS
    siblings = path.parent.is_dir() and _subdirectories(path.parent)
    if siblings:
        hint = did_you_mean(path.name, [child.name for child in siblings])
    return f"no such directory: {hint}"


def _below(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the run at `path`, or the runs below it sorted by name; do not search inside runs."""
    if path.resolve() in seen:  # a link that leads back up
        return
    seen.add(path.resolve())
    if is_run(path):
        yield path
        return
    for child in _subdirectories(path):
        yield from _below(child, seen)


def _subdirectories(path: Path) -> list[Path]:
    return sorted(
        child
        for child in path.iterdir()
        if child.is_dir() and not child.name.startswith(".")
    )


def labels(paths: Sequence[Path]) -> list[str]:
    """Return a short name for each path: the fewest last parts that make it unique."""
    parts = [path.resolve().parts for path in paths]
    names = []
    for own in parts:
        others = [other for other in parts if other != own]
        length = 1
        while length < len(own) and any(
            other[-length:] == own[-length:] for other in others
        ):
            length += 1
        names.append("/".join(own[-length:]).replace("//", "/"))
    return names
