"""The directory of one run: what was run, on what, and what came out. Nothing in it is ever overwritten by another run.

    recipe.yaml        the resolved recipe, loadable again
    ds_config.json     the resolved DeepSpeed configuration, as DeepSpeed got it
    tokenizer/         the vocabulary, in transformers' form (launch/runs/vocabulary.py)
    environment.json   one entry per launch: command line, commit, versions, hardware, layout, notices
    metrics.jsonl      one line per optimizer step, validation and note (launch/runs/metrics.py)
    tensorboard/       the same as events
    loss.png           the loss curve (launch/runs/loss_plot.py)
    result.json        one row of a results table (launch/runs/result.py)
    checkpoints/

Rank 0 alone creates and writes it: pure file work, no communication.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from data.durable_files import Lock, left_by_a_crash, write_atomically
from launch.machine import description
from recipes import catalog
from recipes.nested import differences

# Settings of a DeepSpeed JSON that change no number of the training and no byte of a checkpoint, as dotted prefixes.
HARMLESS_ON_RESUME = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler", "comms_logger",
    "tensorboard", "csv_monitor", "wandb", "comet", "aio",
    "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path",
)  # fmt: skip

# Facts of a plan that decide the shape of a checkpoint.
SAVED_SHAPE = ("layout", "zero_stage", "precision", "padded_vocab")


class RunDirectoryError(ValueError):
    """The directory cannot take this run. The message says what is there, the rule and the fix."""


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. `resumed`: steps of it were there already; `notices`: lines worth showing to the user."""

    path: Path
    resumed: bool = False
    notices: tuple[str, ...] = ()
    lock: Lock | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def recipe_yaml(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def ds_config_json(self) -> Path:
        return self.path / "ds_config.json"

    @property
    def environment_json(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_jsonl(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def loss_png(self) -> Path:
        return self.path / "loss.png"

    @property
    def result_json(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def create(
        cls, path: str | Path | None, plan: Any, *, name: str, command: Sequence[str], resume: bool
    ) -> RunDirectory:
        """Make the directory, or enter it again with `resume`; the files that describe the run are written.

        `path` None: runs/<name>-<ds_config> under the current directory. `name`: the recipe's, as the user names it.
        With `resume` and nothing there the run starts from its beginning (`resumed` is False), so that a job script may
        always say --resume. Raises RunDirectoryError, having changed nothing, where something else is in the way.
        """
        directory = cls(Path(path) if path is not None else default_path(name, plan.ds_name))
        _make(directory.path)
        _refuse_strangers(directory)
        lock = _lock(directory.path)
        try:
            resumed, notices = _admit(directory, plan, resume)
        except RunDirectoryError:
            lock.release()
            raise
        directory.checkpoints.mkdir(exist_ok=True)
        write_atomically(directory.recipe_yaml, catalog.dump(plan.recipe))
        write_atomically(directory.ds_config_json, _json(plan.ds))
        launches = directory.launches() if resumed else []
        write_atomically(
            directory.environment_json, _json({"launches": [*launches, _launch(plan, name, command)]})
        )
        return dataclasses.replace(directory, resumed=resumed, notices=notices, lock=lock)

    def launches(self) -> list[dict[str, Any]]:
        """Entries of environment.json, oldest first."""
        return _read_json(self.environment_json)["launches"] if self.environment_json.exists() else []

    def has_steps(self) -> bool:
        """Whether training has begun here: a step was recorded or something was saved."""
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return saved or any(record["kind"] == "step" for record in read_metrics(self.metrics_jsonl))

    def truncate_metrics(self, step: int) -> None:
        """Keep what was recorded up to and including `step` completed optimizer steps; 0: nothing.

        A resumed run repeats the steps after its checkpoint; their old lines, and the torn line that a killed process
        may leave, would otherwise stand beside the new ones.
        """
        if self.metrics_jsonl.exists():
            kept = [record for record in read_metrics(self.metrics_jsonl) if step and record["step"] <= step]
            write_atomically(self.metrics_jsonl, "".join(json.dumps(record) + "\n" for record in kept))

    def close(self) -> None:
        """Let another process resume this run."""
        if self.lock is not None:
            self.lock.release()


def default_path(name: str, ds_name: str) -> Path:
    """runs/default-sotu-zero3_offload for recipe "default/sotu"."""
    return Path("runs") / re.sub(r"[^A-Za-z0-9._]+", "-", f"{name}-{ds_name}").strip("-")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl, in order. A torn last line is dropped; a broken line elsewhere raises ValueError."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    # What follows the last newline is b"" in a whole file, and what a killed process could not finish otherwise.
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"{path}:{number}: not a line of metrics ({error}): delete that line, or restore the file"
            ) from None
    return records


def _admit(directory: RunDirectory, plan: Any, resume: bool) -> tuple[bool, tuple[str, ...]]:
    """(whether steps of this very run are there, notices), or RunDirectoryError."""
    if not directory.recipe_yaml.exists():
        return False, ()
    saved = _saved_recipe(directory)
    if not directory.has_steps():  # a start that failed before its first step has left nothing worth keeping
        shutil.rmtree(directory.path / "tokenizer", ignore_errors=True)
        return False, ()
    _refuse_other_recipe(directory, saved, plan.recipe)
    if not resume:
        raise RunDirectoryError(
            f"{directory.path} already holds steps of this recipe, and a run is never overwritten: add --resume to go "
            f"on from its newest checkpoint, or start a second run elsewhere with --out"
        )
    _refuse_finished(directory)
    return True, _compare_plans(directory, plan)


def _refuse_finished(directory: RunDirectory) -> None:
    """RunDirectoryError where a finished run left no checkpoint (run.save_last=false): going on would train it again, over its results."""
    saved = directory.checkpoints.is_dir() and any(directory.checkpoints.iterdir())
    if (
        not saved
        and directory.result_json.exists()
        and _read_json(directory.result_json).get("status") == "ok"
    ):
        raise RunDirectoryError(
            f"--resume: {directory.path} holds a finished run without a checkpoint (run.save_last=false): there is nothing to go on from, "
            "and a run is never overwritten; start again elsewhere with --out, with --set run.save_last=true to be able to go on"
        )


def _refuse_strangers(directory: RunDirectory) -> None:
    """RunDirectoryError where files are there that no run made."""
    if directory.recipe_yaml.exists():
        return
    strangers = sorted(entry.name for entry in directory.path.iterdir() if not left_by_a_crash(entry.name))
    strangers = [
        name
        for name in strangers
        if name != directory.checkpoints.name or any(directory.checkpoints.iterdir())
    ]
    if strangers:
        raise RunDirectoryError(
            f"{directory.path} holds {_some(strangers)} but no run (no recipe.yaml): a run starts in a new or empty "
            f"directory and touches nothing else; name another with --out"
        )


def _saved_recipe(directory: RunDirectory) -> Any:
    try:
        return catalog.load_resolved(directory.recipe_yaml)
    except (ValueError, yaml.YAMLError) as error:
        raise RunDirectoryError(
            f"{directory.recipe_yaml} cannot be read as a recipe ({error}): restore it, or name another directory with "
            f"--out"
        ) from None


def _refuse_other_recipe(directory: RunDirectory, saved: Any, recipe: Any) -> None:
    if catalog.digest(saved) == catalog.digest(recipe):
        return
    changed = [
        change for change in differences(yaml.safe_load(catalog.dump(saved)), yaml.safe_load(catalog.dump(recipe)))
        if change[0].split(".")[0] not in catalog.NOT_IN_DIGEST
    ]  # fmt: skip
    raise RunDirectoryError(
        f"{directory.path} holds a run of another recipe, and a run is never overwritten: name another directory with "
        f"--out, or run the recipe that is there. They differ in (there -> now):\n{_listed(changed)}"
    )


def _compare_plans(directory: RunDirectory, plan: Any) -> tuple[str, ...]:
    """Notices of harmless changes since the last launch; RunDirectoryError where the checkpoints would not fit."""
    launches = directory.launches()
    if not launches or not directory.ds_config_json.exists():
        raise RunDirectoryError(
            f"{directory.path} has steps but no environment.json and ds_config.json to say how they were made: restore "
            f"these files, or start again in another directory with --out"
        )
    saved = launches[-1]["plan"]
    shape = [
        change for change in differences(saved, _plan_facts(plan)) if change[0].split(".")[0] in SAVED_SHAPE
    ]
    # Through JSON, since what was saved has lists where a plan may have tuples.
    config = differences(_read_json(directory.ds_config_json), json.loads(_json(plan.ds)))
    prefixes = tuple(f"{key}." for key in HARMLESS_ON_RESUME)
    harmless = [change for change in config if f"{change[0]}.".startswith(prefixes)]
    changed = shape + [change for change in config if change not in harmless]
    if changed:
        raise RunDirectoryError(
            f"--resume: {directory.path} was run with {saved['ds_name']}.json in another layout or configuration, and "
            f"its checkpoints fit only the one they were saved under: launch with that ds_config and number of "
            f"processes, or start again with --out. They differ in (there -> now):\n{_listed(changed)}"
        )
    return tuple(f"resumed with {key}: {old} -> {new}" for key, old, new in harmless)


def _plan_facts(plan: Any) -> dict[str, Any]:
    layout = plan.layout
    return {
        "ds_name": plan.ds_name,
        "layout": {
            key: getattr(layout, key) for key in ("tp", "pp", "dp", "micro", "accumulation", "global_batch")
        },
        "zero_stage": plan.zero_stage,
        "offload": plan.offload,
        "precision": plan.precision,
        "padded_vocab": plan.padded_vocab,
        "notices": [str(notice) for notice in plan.notices],
    }


def _launch(plan: Any, name: str, command: Sequence[str]) -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(command),
        "working_directory": os.getcwd(),
        "recipe": name,
        "plan": _plan_facts(plan),
        **description.describe(),
    }


def _lock(path: Path) -> Lock:
    try:
        return Lock.take(path)
    except BlockingIOError:
        raise RunDirectoryError(
            f"{path}: another process is training in it: wait for it or stop it, or name another directory with --out"
        ) from None


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise RunDirectoryError(
            f"{path} is a file, a run needs a directory: name another with --out"
        ) from None
    except OSError as error:
        raise RunDirectoryError(
            f"{path} cannot be made ({error.strerror}): name a directory you may write with --out"
        ) from None
    if not os.access(path, os.W_OK):
        raise RunDirectoryError(f"{path} is not writable for you: name a directory you may write with --out")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _listed(changes: Sequence[tuple[str, Any, Any]]) -> str:
    return "\n".join(f"  {key}: {old} -> {new}" for key, old, new in changes)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunDirectoryError(
            f"{path} is not JSON ({error}): restore it, or name another directory with --out"
        ) from None
