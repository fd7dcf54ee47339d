"""The directory of one run: what was run, on what, and what came out.

Another run never overwrites anything in it.

    plan.json          what was decided: recipe, layout, DeepSpeed configuration (ds_configs/plan.py)
    recipe.yaml        the resolved recipe, loadable again
    ds_config.json     the resolved DeepSpeed configuration, as DeepSpeed got it
    tokenizer/         the vocabulary, in transformers' form (launch/runs/vocabulary.py)
    environment.json   one entry per launch: command line, commit, versions, hardware, layout, notices
    metrics.jsonl      one line per optimizer step, validation and note (launch/runs/metrics.py)
    tensorboard/       the same as events
    loss.png           the loss curve (launch/runs/loss_plot.py)
    result.json        one row of a results table (launch/runs/result.py)
    checkpoints/

Rank 0 alone creates and writes it: pure file work, no communication. What may start here is decided in
launch/runs/admission.py.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from data.durable_files import Lock, write_atomically
from ds_configs.findings import Notice
from ds_configs.plan import Plan, plan_from_json, plan_to_json
from launch.machine import description
from recipes import catalog
from recipes.layout import Layout

OWN_FILES = ("recipe", "ds")  # parts of a plan that have a file of their own, and are no facts of a launch


class Unreadable(ValueError):
    """A file of a run is missing or broken. The message names it and what is wrong."""


@dataclass(frozen=True)
class Launch:
    """One start of a run, an entry of environment.json.

    Attributes:
        started: local time, as "2026-07-01T10:00:00+0000".
        recipe: table/row as the user names it.
        plan: facts of the plan, without recipe and DeepSpeed configuration.
        machine: `description.describe()`.
    """

    started: str
    command: tuple[str, ...]
    working_directory: str
    recipe: str
    tiny: bool
    emulated_fp16: bool
    plan: Mapping[str, Any]
    machine: Mapping[str, Any]

    @classmethod
    def now(cls, plan: Plan, *, name: str, command: Sequence[str], tiny: bool, emulated_fp16: bool) -> Launch:
        facts = {key: value for key, value in plan_to_json(plan).items() if key not in OWN_FILES}
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        machine = description.describe()
        return cls(started, tuple(command), os.getcwd(), name, tiny, emulated_fp16, facts, machine)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Launch:
        """From environment.json; earlier versions tell tiny and emulated runs by their command only."""
        command = tuple(entry.get("command") or ())
        own = {
            **{key: entry.get(key, "") for key in ("started", "working_directory", "recipe")},
            "command": command,
            "tiny": entry.get("tiny", "--tiny" in command),
            "emulated_fp16": entry.get("emulated_fp16", "--emulate_fp16" in command),
            "plan": entry.get("plan") or {},
        }
        return cls(**own, machine={key: value for key, value in entry.items() if key not in own})

    def entry(self) -> dict[str, Any]:
        """As environment.json has it: the machine's facts next to the others."""
        values = {key: value for key, value in vars(self).items() if key != "machine"}
        return {**values, "command": list(self.command), **self.machine}

    @property
    def started_at(self) -> datetime | None:
        try:
            return datetime.strptime(self.started, "%Y-%m-%dT%H:%M:%S%z")
        except ValueError:
            return None


class _File:
    """A name in the directory of a run; its path, where a run asks for it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run. `resumed`: it already held steps; `notices`: lines worth showing to the user."""

    path: Path
    resumed: bool = False
    notices: tuple[str, ...] = ()
    lock: Lock | None = field(default=None, repr=False, compare=False)

    plan_json = _File("plan.json")
    recipe_yaml = _File("recipe.yaml")
    ds_config_json = _File("ds_config.json")
    environment_json = _File("environment.json")
    metrics_jsonl = _File("metrics.jsonl")
    tensorboard = _File("tensorboard")
    loss_png = _File("loss.png")
    result_json = _File("result.json")
    checkpoints = _File("checkpoints")

    def write_description(self, plan: Plan, launches: Sequence[Launch]) -> None:
        """Write the files that say what is run."""
        write_atomically(self.recipe_yaml, catalog.dump(plan.recipe))
        write_atomically(self.ds_config_json, _json(plan.ds))
        write_atomically(self.plan_json, _json(plan_to_json(plan)))
        write_atomically(self.environment_json, _json({"launches": [launch.entry() for launch in launches]}))

    def launches(self) -> list[Launch]:
        """Oldest first; none where there is no environment.json. Raises Unreadable."""
        if not self.environment_json.exists():
            return []
        entries = read_json(self.environment_json).get("launches", [])
        return [Launch.read(entry) for entry in entries if isinstance(entry, Mapping)]

    def plan(self) -> Plan:
        """The plan of the newest launch. Raises Unreadable."""
        if not self.plan_json.exists():
            return self._plan_of_earlier_version()
        try:
            return plan_from_json(read_json(self.plan_json))
        except (KeyError, TypeError, ValueError) as error:
            raise error if isinstance(error, Unreadable) else _unreadable(self.plan_json, error) from None

    def _plan_of_earlier_version(self) -> Plan:
        """From recipe.yaml, ds_config.json and the facts in environment.json."""
        try:
            recipe = catalog.load_resolved(self.recipe_yaml)
        except (ValueError, OSError) as error:
            raise _unreadable(self.recipe_yaml, error) from None
        try:
            facts = dict(self.launches()[-1].plan)
            facts["layout"] = Layout(**facts["layout"])
            facts["notices"] = tuple(Notice("", text) for text in facts["notices"])
            return Plan(recipe=recipe, ds=read_json(self.ds_config_json), **facts)
        except (KeyError, TypeError, IndexError) as error:
            what = f"does not say how the run was made, {error!r}"
            raise _unreadable(self.environment_json, what) from None

    def close(self) -> None:
        """Let another process resume this run."""
        if self.lock is not None:
            self.lock.release()


def default_path(name: str, ds_name: str) -> Path:
    """runs/default-sotu-zero3_offload for recipe "default/sotu"."""
    return Path("runs") / re.sub(r"[^A-Za-z0-9._]+", "-", f"{name}-{ds_name}").strip("-")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises Unreadable."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _unreadable(path, f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _unreadable(path, f"holds {type(value).__name__}, not an object")
    return value


def _unreadable(path: Path, what: object) -> Unreadable:
    return Unreadable(f"{path}: {' '.join(str(what).split())}")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
