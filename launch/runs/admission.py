"""What may start or resume in a run directory, in which nothing is ever overwritten."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.durable_files import Lock, left_by_a_crash
from ds_configs.plan import Plan, plan_to_json
from launch.runs.directory import Launch, RunDirectory, default_path
from launch.runs.metrics import read_metrics
from recipes import catalog, files
from recipes.nested import differences
from recipes.schema import Recipe

# Settings of a DeepSpeed JSON that change neither the training nor a checkpoint, as dotted prefixes.
HARMLESS_ON_RESUME = (
    *("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "flops_profiler"),
    *("comms_logger", "tensorboard", "csv_monitor", "wandb", "comet", "aio"),
    *("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path"),
)
# Parts of a plan that decide the shape of a checkpoint.
SAVED_SHAPE = ("layout", "zero_stage", "precision", "padded_vocab")


class RunDirectoryError(ValueError):
    """The directory cannot take this run. The message says what is there, the rule and the fix."""


def admit(
    path: str | Path | None,
    plan: Plan,
    *,
    name: str,
    command: Sequence[str],
    resume: bool,
    tiny: bool,
    emulated_fp16: bool,
) -> RunDirectory:
    """Make the directory, or enter it again with `resume`; the files that describe the run are written.

    `path` None: runs/<name>-<ds_config> under the current directory. `name`: the recipe's, as the user names
    it. With `resume` and nothing there the run starts from its beginning (`resumed` is False), so that a job
    script may always say --resume. Raises RunDirectoryError, having changed nothing, where something else is
    in the way.
    """
    directory = RunDirectory(Path(path) if path is not None else default_path(name, plan.ds_name))
    _make(directory.path)
    _refuse_strangers(directory)
    lock = _lock(directory.path)
    try:
        resumed, notices = _admit(directory, plan, resume)
        former = directory.launches() if resumed else []
    except ValueError as error:
        lock.release()
        if isinstance(error, files.FileError):
            raise RunDirectoryError(f"{error}: restore it, or name another directory with --out") from None
        raise error if isinstance(error, RunDirectoryError) else RunDirectoryError(str(error)) from None
    directory.checkpoints.mkdir(exist_ok=True)
    launch = Launch.now(plan, name=name, command=command, tiny=tiny, emulated_fp16=emulated_fp16)
    directory.write_description(plan, [*former, launch])
    return dataclasses.replace(directory, resumed=resumed, notices=notices, lock=lock)


def _admit(directory: RunDirectory, plan: Plan, resume: bool) -> tuple[bool, tuple[str, ...]]:
    """(whether it resumes, notices). Raises RunDirectoryError, or ValueError for a broken file."""
    if not directory.recipe_yaml.exists():
        return False, ()
    if not (_saved(directory) or read_metrics(directory.metrics_jsonl).steps):
        # A start that failed before its first step has left nothing worth keeping.
        shutil.rmtree(directory.path / "tokenizer", ignore_errors=True)
        return False, ()
    saved = directory.plan()
    _refuse_other_recipe(directory, saved.recipe, plan.recipe)
    if not resume:
        raise RunDirectoryError(
            f"{directory.path} already holds steps of this recipe, and a run is never overwritten: add "
            "--resume to resume from its newest checkpoint, or start a second run elsewhere with --out"
        )
    _refuse_finished(directory)
    return True, _compare_plans(directory, saved, plan)


def _saved(directory: RunDirectory) -> bool:
    return any(directory.checkpoints.glob("*"))


def _refuse_finished(directory: RunDirectory) -> None:
    """Refuse to train a finished run without a checkpoint (run.save_last=false) again, over its results."""
    if _saved(directory) or not directory.result_json.exists():
        return
    if files.read_json_object(directory.result_json).get("status") == "ok":
        raise RunDirectoryError(
            f"--resume: {directory.path} holds a finished run without a checkpoint (run.save_last=false): "
            "there is nothing to resume from, and a run is never overwritten; start again elsewhere with "
            "--out, with --set run.save_last=true to be able to resume"
        )


def _refuse_strangers(directory: RunDirectory) -> None:
    """Refuse a directory with files that no run made."""
    if directory.recipe_yaml.exists():
        return
    empty = () if _saved(directory) else (directory.checkpoints.name,)
    names = sorted(entry.name for entry in directory.path.iterdir())
    strangers = [name for name in names if not left_by_a_crash(name) and name not in empty]
    if strangers:
        more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
        raise RunDirectoryError(
            f"{directory.path} holds {', '.join(strangers[:3])}{more} but no run (no recipe.yaml): a run "
            "starts in a new or empty directory and touches nothing else; name another with --out"
        )


def _refuse_other_recipe(directory: RunDirectory, saved: Recipe, recipe: Recipe) -> None:
    if catalog.digest(saved) == catalog.digest(recipe):
        return
    both = (each.model_dump(mode="json", by_alias=True) for each in (saved, recipe))
    found = differences(*both)
    changed = [change for change in found if change[0].split(".")[0] not in catalog.NOT_IN_DIGEST]
    raise RunDirectoryError(
        f"{directory.path} holds a run of another recipe, and a run is never overwritten: name another "
        f"directory with --out, or run the recipe that is there. {_differ(changed)}"
    )


def _compare_plans(directory: RunDirectory, saved: Plan, plan: Plan) -> tuple[str, ...]:
    """Notices of harmless changes; RunDirectoryError where the checkpoints would not fit."""
    # Through JSON, since what was saved has lists where a plan may have tuples.
    there, now = (json.loads(json.dumps(plan_to_json(each))) for each in (saved, plan))
    shape = [change for change in differences(there, now) if change[0].split(".")[0] in SAVED_SHAPE]
    config = differences(there["ds"], now["ds"])
    prefixes = tuple(f"{key}." for key in HARMLESS_ON_RESUME)
    harmless = [change for change in config if f"{change[0]}.".startswith(prefixes)]
    changed = shape + [change for change in config if change not in harmless]
    if changed:
        raise RunDirectoryError(
            f"--resume: {directory.path} was run with {saved.ds_name}.json in another layout or "
            "configuration, and its checkpoints fit only the one they were saved under: launch with that "
            f"ds_config and number of processes, or start again with --out. {_differ(changed)}"
        )
    return tuple(f"resumed with {key}: {old} -> {new}" for key, old, new in harmless)


def _lock(path: Path) -> Lock:
    try:
        return Lock.take(path)
    except BlockingIOError:
        raise RunDirectoryError(
            f"{path}: another process is training in it: wait for it or stop it, or name another directory "
            "with --out"
        ) from None


def _make(path: Path) -> None:
    fix = "name a directory you may write with --out"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        used = f"{path} is a file, a run needs a directory"
        raise RunDirectoryError(f"{used}: name another with --out") from None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be made ({error.strerror}): {fix}") from None
    if not os.access(path, os.W_OK):
        raise RunDirectoryError(f"{path} is not writable for you: {fix}")


def _differ(changes: Sequence[tuple[str, Any, Any]]) -> str:
    lines = (f"\n  {key}: {old} -> {new}" for key, old, new in changes)
    return f"They differ in (there -> now):{''.join(lines)}"
