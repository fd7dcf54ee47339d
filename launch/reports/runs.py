"""Read a run directory for a report: complete, unfinished, or with broken files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from ds_configs.plan import Plan
from launch.evaluation import pretrained
from launch.evaluation.pretrained import Pretrained
from launch.evaluation.scores import Score, read_scores
from launch.ranks import out_of_memory
from launch.records.deviations import Deviation
from launch.records.directory import Launch, RunDirectory
from launch.records.facts import Ending, RunFacts
from launch.records.metrics import Records, curve, read_metrics
from launch.records.result import Result, make_result, read_result
from recipes.schema import Recipe

Points = list[tuple[float, float]]
T = TypeVar("T")

UNFINISHED, UNREADABLE, OOM = "unfinished", "unreadable", "OOM"


@dataclass(frozen=True)
class Run:
    """The contents of a run directory.

    Attributes:
        name: its recipe, table/row, without "-tiny".
        result: for an unfinished run made from its metrics; empty where the files do not suffice.
        plan, launch: of the newest launch; None if unreadable.
        training, validation: (step, nats) with finite losses; for BERT pretraining the masked-token loss.
        seconds: (step, wall time in seconds).
        scores: from scores.json, written by launch/score.py.
        pretrained: the pretraining run of a fine-tuning run's weights; None without one.
    """

    path: Path
    label: str
    name: str
    result: Result
    plan: Plan | None
    launch: Launch | None
    training: Points
    validation: Points
    seconds: Points
    problems: tuple[str, ...]
    scores: tuple[Score, ...] = ()
    pretrained: Pretrained | None = None

    @property
    def loss_per(self) -> str:
        """Return the unit of its mean losses: token, masked token or example."""
        return self.recipe.model.predicted if self.recipe else self.result.loss_per

    @property
    def tiny(self) -> bool:
        return self.result.tiny

    @property
    def status(self) -> str:
        return "measured" if self.result.status == "ok" else self.result.status

    @property
    def full_label(self) -> str:
        """Return the label, marked if the run is tiny."""
        return self.label + (" (TINY)" if self.tiny else "")

    @property
    def readable(self) -> bool:
        """Check that other runs can be compared with this one."""
        return self.plan is not None and self.status != UNREADABLE

    @property
    def recipe(self) -> Recipe | None:
        return self.plan.recipe if self.plan else None

    @property
    def machine(self) -> Mapping[str, Any]:
        return self.launch.machine if self.launch else {}

    @property
    def table(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def pretrained_table(self) -> str | None:
        """Return the table of the row that pretrained the weights."""
        return self.pretrained.recipe.rpartition("/")[0] if self.pretrained else None

    @property
    def started(self) -> datetime | None:
        try:
            return datetime.strptime(self.launch.started, "%Y-%m-%dT%H:%M:%S%z") if self.launch else None
        except ValueError:
            return None


def read_run(path: Path, label: str, original_of: Callable[[str], Recipe | None]) -> Run:
    """Read all readable files of a run; add the others to its `problems`.

    `original_of` returns the current recipe of a name; it serves runs that wrote no deviations.
    """
    problems: list[str] = []
    at = RunDirectory(path)
    plan = _read(at.plan, problems)
    launches = _read(at.launches, problems)
    launch = launches[-1] if launches else None
    records = _read(lambda: read_metrics(at.metrics_jsonl, problems), problems)
    written = _read(lambda: read_result(at.result_json), problems) if at.result_json.exists() else None
    if records is not None and not records.steps and not records.broken and written and written.steps:
        lost = f"has no step, and result.json counts {written.steps:,}"
        problems.append(f"{at.metrics_jsonl}: {lost}: restore it, or leave this run out")
    if launches == [] and at.environment_json.exists():
        problems.append(f"{at.environment_json}: names no launch: restore it, or leave this run out")
    records = records or Records()
    tiny = written.tiny if written else launch is not None and launch.tiny
    name = (written.recipe if written else "") or (launch.recipe if launch else "") or label
    name = name.removesuffix("-tiny") if tiny else name
    oom = out_of_memory.reason(path)
    if written is None or _continued(records, written):
        # A resumed run keeps its old result.json until it ends again. It may resume from an earlier step.
        status = OOM if oom else UNFINISHED if written or not at.result_json.exists() else UNREADABLE
        known = Result(name, status if oom else UNREADABLE, tiny=tiny, reason=oom)
        made = _unfinished_result(
            plan, launch, records, original_of(name), problems, replace(known, status=status)
        )
        result = made or known
    else:
        result = written
        if oom and result.status not in ("ok", OOM):  # from a later launch that wrote no result
            stated = (Deviation("status", OOM, is_=oom), *result.deviations)
            result = replace(result, status=OOM, reason=oom, deviations=stated)
    curves = (curve(each, records.part) for each in (records.steps, records.validations))
    training, validation = ([(float(step), value) for step, value in each] for each in curves)
    seconds = [(float(step.step), step.seconds) for step in records.steps if step.seconds > 0]
    points = (training, validation, seconds)
    scores = _read(lambda: read_scores(path), problems) or ()
    before = _read(lambda: pretrained.read(path), problems)
    return Run(path, label, name, result, plan, launch, *points, tuple(problems), scores, before)


def _continued(records: Records, result: Result) -> bool:
    """Check whether the run continued after the result; with broken lines, fewer steps are no sign of it."""
    last = records.steps[-1].step if records.steps else result.steps
    return last > result.steps if records.broken else last != result.steps


def _unfinished_result(
    plan: Plan | None,
    launch: Launch | None,
    records: Records,
    original: Recipe | None,
    problems: list[str],
    known: Result,
) -> Result | None:
    """Make a result from the records so far, with the name and status of `known`; None without a plan."""
    if plan is None or launch is None:
        return None
    try:
        facts = RunFacts(plan, known.recipe, launch.machine, original, known.tiny, launch.emulated_fp16)
        made = make_result(facts, records, Ending(known.status, known.reason))
    except KeyError as error:
        what = f"environment.json of {known.recipe} does not describe the machine"
        problems.append(f"{what}, {error!r}: restore it")
        return None
    except ArithmeticError:
        problems.append(f"metrics.jsonl of {known.recipe} has seconds or losses that no run has: restore it")
        return None
    if known.status != UNFINISHED:
        return made
    return replace(made, deviations=(Deviation("unfinished", is_=made.steps), *made.deviations))


def _read(read: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return read()
    except (ValueError, OSError) as error:
        problems.append(f"{' '.join(str(error).split())}: restore it, or leave this run out")
        return None


def differences(first: Points, second: Points) -> Points:
    """Return (step, absolute difference) at the common steps of two curves."""
    one, other = dict(first), dict(second)
    return [(step, abs(one[step] - other[step])) for step in sorted(one.keys() & other.keys())]
