"""The directory of one run, with its description, records and results.

Another run never overwrites anything in it.

    plan.json          the resolved plan: recipe, layout, DeepSpeed configuration (ds_configs/plan.py)
    recipe.yaml        the resolved recipe, loadable again
    original.yaml      the recipe before --tiny, --set and --steps
    ds_config.json     the resolved DeepSpeed configuration, as DeepSpeed got it
    ds_config_given/   the DeepSpeed JSON under its own name, as it was given
    tokenizer/         the vocabulary, in transformers' form (launch/records/vocabulary.py)
    environment.json   one entry per launch: command line, commit, versions, hardware, layout, notices
    metrics.jsonl      one line per optimizer step, validation and note (launch/records/metrics.py)
    tensorboard/       the same as events
    loss.png           the loss curves (launch/records/loss_plot.py)
    card.png           the run in one picture (launch/records/card.py)
    result.json        one row of a results table (launch/records/result.py)
    wandb-run-id.txt   the id at Weights & Biases, where it is logged to (launch/records/wandb_run.py)
    checkpoints/
    profile/           traces of the steps of run.profile, of each rank

Evaluation adds scores.json, predictions/ and pretrained.json (launch/evaluation/).

Rank 0 alone creates and writes it: pure file work, no communication. launch/records/admission.py decides
which run may start here.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from data.durable_files import Lock, write_atomically
from ds_configs.plan import FORM as PLAN
from ds_configs.plan import Plan, plan_facts, plan_to_json
from launch.records.facts import RunFacts
from recipes import catalog, files
from recipes.schema import Recipe

if TYPE_CHECKING:
    from launch.records.curves import Curve, ReferenceWatch

GIVE = "give the directory of a run, which holds its recipe.yaml"
# of the name of a checkpoint while it is written, or of one that a killed run left half written
WRITING = ".writing"


@dataclass(frozen=True)
class Launch:
    """One start of a run, an entry of environment.json."""

    started: str  # local time, as "2026-07-01T10:00:00+0000"
    command: tuple[str, ...]
    working_directory: str
    recipe: str
    tiny: bool
    emulated_fp16: bool
    plan: Mapping[str, Any]  # its facts, without recipe and DeepSpeed configuration
    machine: Mapping[str, Any]  # `description.describe()`
    initial_weights: Mapping[str, Any] | None = None  # of --init_from

    @classmethod
    def now(cls, run: RunFacts, command: Sequence[str]) -> Launch:
        return cls(
            time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            tuple(command),
            os.getcwd(),
            run.name,
            run.tiny,
            run.emulated_fp16,
            plan_facts(run.plan),
            run.machine,
            run.initial_weights,
        )

    @classmethod
    def read(cls, entry: Mapping[str, Any], where: Path) -> Launch:
        """Read an entry of environment.json. Raises FileError."""
        own = {each.name for each in fields(cls)}
        machine = {key: value for key, value in entry.items() if key not in own}
        return files.checked(TypeAdapter(cls), {**entry, "machine": machine}, where)

    @property
    def row(self) -> str:
        """The recipe, table/row, without the mark of --tiny."""
        return row_of(self.recipe, self.tiny)

    def entry(self) -> dict[str, Any]:
        """Return the entry of environment.json, with the machine's facts next to the others."""
        values = {key: value for key, value in vars(self).items() if key != "machine"}
        return {**values, "command": list(self.command), **self.machine}


def row_of(name: str, tiny: bool) -> str:
    """Return the recipe's name of a run without the mark of --tiny."""
    return name.removesuffix("-tiny") if tiny else name


@dataclass(frozen=True)
class _Place:
    """The path of a file, or of a folder, in the directory of a run."""

    name: str
    folder: bool = False

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. `resumed`: it already held steps; `notices`: lines worth showing to the user."""

    path: Path
    resumed: bool = False
    notices: tuple[str, ...] = ()
    lock: Lock | None = field(default=None, repr=False, compare=False)

    plan_json = _Place("plan.json")
    recipe_yaml = _Place("recipe.yaml")
    original_yaml = _Place("original.yaml")
    ds_config_json = _Place("ds_config.json")
    ds_config_given = _Place("ds_config_given", folder=True)
    environment_json = _Place("environment.json")
    metrics_jsonl = _Place("metrics.jsonl")
    tensorboard = _Place("tensorboard", folder=True)
    loss_png = _Place("loss.png")
    card_png = _Place("card.png")
    result_json = _Place("result.json")
    checkpoints = _Place("checkpoints", folder=True)
    tokenizer = _Place("tokenizer", folder=True)
    stop = _Place("STOP")
    lock_file = _Place(Lock.FILE)

    @classmethod
    def around(cls, checkpoint: Path) -> RunDirectory | None:
        """Return the run that a checkpoint lies in, described or not; None: it lies in none."""
        run = cls(checkpoint.parent.parent)
        return run if run.checkpoints == checkpoint.parent else None

    @property
    def of_another_kind(self) -> list[Path]:
        """The files that should be folders, the folders that should be files, pipes and broken links."""
        odd = []
        for place in vars(RunDirectory).values():
            if isinstance(place, _Place):
                path = self.path / place.name
                right = path.is_dir() if place.folder else path.is_file()
                if not right and os.path.lexists(path):
                    odd.append(path)
        return odd

    def write_description(self, plan: Plan, launches: Sequence[Launch]) -> None:
        """Write the files that describe the run."""
        write_atomically(self.recipe_yaml, catalog.dump(plan.recipe))
        entries = [launch.entry() for launch in launches]
        for path, value in (
            (self.ds_config_json, plan.ds),
            (self.plan_json, plan_to_json(plan)),
            (self.environment_json, {"launches": entries}),
        ):
            text = json.dumps(value, indent=2, ensure_ascii=False)
            write_atomically(path, f"{text}\n")

    def write_origin(self, run: RunFacts) -> None:
        """Write the recipe as its table has it, and the DeepSpeed JSON as it was given."""
        if run.original is not None:
            write_atomically(self.original_yaml, catalog.dump(run.original))
        if run.ds_config is None:
            return
        given = self.ds_config_given / f"{run.plan.ds_name}.json"
        text = files.read_text(run.ds_config)
        self.ds_config_given.mkdir(exist_ok=True)
        write_atomically(given, text)
        for earlier in self.ds_config_given.glob("*.json"):
            if earlier != given:
                earlier.unlink()

    def launches(self) -> list[Launch]:
        """Read all launches, the oldest first; [] without environment.json. Raises FileError."""
        if not self.environment_json.exists():
            return []
        path = self.environment_json
        entries = files.read_json_object(path).get("launches", [])
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) for entry in entries
        ):
            files.refuse(
                path, "launches is no list of objects", "it has one for every launch"
            )
        return [Launch.read(entry, path) for entry in entries]

    def newest_launch(self) -> Launch | None:
        """Read the newest launch; None: none is recorded. Raises FileError."""
        launches = self.launches()
        return launches[-1] if launches else None

    def named_recipe(self, flag: str = "RUN") -> catalog.NamedRecipe:
        """Find the recipe with every value; `flag` names the directory. Raises ProblemsError."""
        if not files.is_file(self.recipe_yaml):
            files.refuse(f"{flag} {self.path}", "holds no run", fix=GIVE)
        return catalog.find(self.path)

    def recipe(self, flag: str = "RUN") -> Recipe:
        """Read the recipe with every value; `flag` names the directory. Raises ProblemsError."""
        return self.named_recipe(flag).recipe

    def plan(self) -> Plan:
        """Read the plan of the newest launch. Raises FileError."""
        return files.checked(
            PLAN, files.read_json_object(self.plan_json), self.plan_json
        )

    def watch(self, run: RunFacts) -> ReferenceWatch | None:
        """Return what judges a run by the curve of its recipe; None: there is no curve. Raises FileError."""
        curve = curve_of(run)
        if curve is None:
            return None
        from launch.records.curves import ReferenceWatch
        from launch.records.metrics import read_metrics

        earlier = [each.initial_weights for each in self.launches()]
        given = any((run.initial_weights, *earlier))
        before = read_metrics(self.metrics_jsonl, problems=[])
        return ReferenceWatch(curve, run, given, before)

    def close(self) -> None:
        """Release the lock, so that another process may resume this run."""
        if self.lock is not None:
            self.lock.release()


def curve_of(run: RunFacts) -> Curve | None:
    """Read the reference curve of a run's recipe; None: there is none. Raises FileError."""
    stated = run.plan.recipe.curve
    file = catalog.CURVES / f"{run.name.replace('/', '-')}.json"
    if stated:
        file = files.path_of(stated, "curve")
    elif not file.is_file():
        return None
    from launch.records import curves

    return curves.read(file)
