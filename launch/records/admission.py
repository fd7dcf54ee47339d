"""Admission of a run to a run directory, in which nothing is ever overwritten."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from data.durable_files import Lock, left_by_a_crash
from ds_configs.plan import Plan, plan_to_json
from launch.console import arguments
from launch.records.directory import WRITING, Launch, RunDirectory
from launch.records.facts import OURS, RECORDS_LOST, RunFacts
from launch.records.metrics import Records, read_metrics, unused_name
from recipes import files
from recipes.key_paths import (
    KEPT_BY_RESUME,
    NOTED_BY_RESUME,
    Keys,
    changes,
    differences,
)
from recipes.problems import counted
from recipes.schema import Recipe

# Facts of a plan that may change when a run is resumed.
FACTS = Keys(
    {"layout", "ds_name", "zero_stage", "offload", "precision", "padded_vocab"}
)


def admit(
    path: str | Path | None,
    run: RunFacts,
    command: Sequence[str],
    *,
    resume: bool = False,
    newest: int | None = None,
    damaged: Sequence[tuple[Path, str]] = (),
) -> RunDirectory:
    """Make the directory, or enter it again with `resume`, and write the files that describe the run.

    `path` None: runs/<name>-<ds_config> under the current directory. `newest`: steps of the newest checkpoint
    there that can be resumed; `damaged`: (directory, damage) of newer ones. With `resume` and an empty
    directory the run starts at step 0 (`resumed` is False), so that a job script may always say --resume. A
    refusal raises ValueError and changes nothing.
    """
    plan = run.plan
    directory = RunDirectory(
        Path(path or arguments.run_directory(run.name, plan.ds_name))
    )
    arguments.directory("--out", directory.path).mkdir(parents=True, exist_ok=True)
    odd = directory.of_another_kind
    if odd:
        raise ValueError(
            f"{', '.join(map(str, odd))}: a run keeps a {'directory' if odd[0].is_file() else 'file'} under "
            "that name; move it away, or name another directory with --out"
        )
    _refuse_strangers(directory)
    try:
        lock = Lock.take(directory.path)
    except BlockingIOError as holder:
        raise ValueError(
            f"{directory.path}: {holder} is training in it: wait for it, or have it save and end with `touch "
            f"{directory.stop}`; or name another directory with --out"
        ) from None
    try:
        resumed, notices = _admit_locked(directory, plan, resume, newest, damaged)
        former = directory.launches() if resumed else []
    except ValueError as error:
        lock.release()
        if isinstance(error, files.FileError):
            raise ValueError(
                f"{error}: restore it, or name another directory with --out"
            ) from None
        raise
    directory.checkpoints.mkdir(exist_ok=True)
    directory.write_origin(run)
    directory.write_description(plan, [*former, Launch.now(run, command)])
    return dataclasses.replace(directory, resumed=resumed, notices=notices, lock=lock)


def _admit_locked(
    directory: RunDirectory,
    plan: Plan,
    resume: bool,
    newest: int | None,
    damaged: Sequence[tuple[Path, str]],
) -> tuple[bool, tuple[str, ...]]:
    """Return (resumed, notices)."""
    records = Records()
    if directory.recipe_yaml.exists():
        # the recorder names broken lines
        records = read_metrics(directory.metrics_jsonl, problems=[])
    steps = records.steps
    kept = [each for each in directory.checkpoints.glob("*") if each.suffix != WRITING]
    if not (kept or steps or records.broken):
        # A start that failed before its first step left nothing to keep.
        shutil.rmtree(directory.tokenizer, ignore_errors=True)
        first = f"a first start: {directory.path} holds nothing to resume yet"
        return False, (first,) if resume else ()
    saved = _plan_of_same_recipe(directory, plan)
    if not resume:
        raise ValueError(
            f"{directory.path} already holds steps of this recipe, and a run is never overwritten: train "
            "on from its newest checkpoint with --resume, or start a second run elsewhere with --out"
        )
    if newest is not None and plan.recipe.task is not None:
        _refuse_another_engine(directory.path, saved, plan)
    if newest is None:
        _refuse_lost(directory, saved.recipe, damaged, records)
        return False, _rename_metrics(directory, records, plan.recipe.begins_after)
    done = newest
    if steps:
        done = max(newest, steps[-1].step)
    _refuse_cut(directory, plan, done)
    return True, _notices_of_changes(saved, plan)


def foresee(path: Path, plan: Plan, newest: int | None) -> tuple[str, ...]:
    """Return what a resume of the run would change, and change nothing. Raises ValueError: it is refused.

    `newest`: steps of its newest whole checkpoint.
    """
    directory = RunDirectory(path)
    if newest is None:
        return (f"{path} holds no checkpoint to resume",)
    saved = _plan_of_same_recipe(directory, plan)
    _refuse_cut(directory, plan, newest)
    goes_on = f"resumes {path} after step {newest}"
    if newest >= plan.recipe.steps:
        goes_on = (
            f"{path} is done: all {newest} steps are made, and --steps N trains on"
        )
    return (goes_on, *_notices_of_changes(saved, plan))


def _plan_of_same_recipe(directory: RunDirectory, plan: Plan) -> Plan:
    """Read the run's plan. Raises ValueError where it trains another recipe."""
    saved = directory.plan()
    refused = changes(saved.recipe, plan.recipe, KEPT_BY_RESUME)
    if refused:
        differ = "".join(f"\n  {key}: {old} -> {new}" for key, old, new in refused)
        raise ValueError(
            f"{directory.path} holds a run of another recipe, and a run is never overwritten: name another "
            "directory with --out, or give these keys the values that are there (--steps N trains longer and "
            "keeps the schedule; --branch goes on from a checkpoint with another rate, batch or text, and "
            "--init_from with its weights alone). They differ in (there -> "
            f"now):{differ}"
        )
    return saved


def _refuse_cut(directory: RunDirectory, plan: Plan, done: int) -> None:
    if plan.recipe.steps < done:
        raise ValueError(
            f"--steps {plan.recipe.steps}: {directory.path} has {counted(done, 'step')} done, and a run is "
            f"never cut back: give --steps {done} or more, or start another run with --out"
        )


def _refuse_another_engine(path: Path, saved: Plan, plan: Plan) -> None:
    """Refuse to resume a fine-tuning, whose checkpoints are the engine's own, under another one."""
    for name in ("zero_stage", "offload", "precision", "layout.dp"):
        before = attrgetter(name)(saved)
        now = attrgetter(name)(plan)
        name = name.replace("layout.dp", "processes")
        if before != now:
            raise ValueError(
                f"{path} was trained with {name} {before}, and now it is {now}: DeepSpeed's checkpoints are "
                f"read only by the engine that wrote them; resume with {before}, or start again with --out"
            )


def _refuse_lost(
    directory: RunDirectory,
    recipe: Recipe,
    damaged: Sequence[tuple[Path, str]],
    records: Records,
) -> None:
    """Refuse a run with records whose checkpoints are damaged, gone or were never wanted.

    A run that was killed before its first complete save is not refused.
    """
    elsewhere = "or start again elsewhere with --out"
    if damaged:
        named = "".join(f"\n  {path}: {why}" for path, why in damaged)
        raise ValueError(
            f"--resume: no checkpoint in {directory.path} is whole, and its steps are not thrown away: "
            f"restore one of them from a copy, {elsewhere}{named}"
        )
    ended = False
    if directory.result_json.exists():
        result = files.read_json_object(directory.result_json)
        ended = result.get("status") in ("ok", RECORDS_LOST)
    was_saved = any(not save.problem for save in records.saves)
    if was_saved or (ended and recipe.run.save_last):
        raise ValueError(
            f"--resume: {directory.path} has {counted(len(records.steps), 'step')} recorded and saved "
            f"checkpoints, of which {directory.checkpoints} holds none any more: put them back, {elsewhere}"
        )
    if ended:
        raise ValueError(
            f"--resume: {directory.path} holds a finished run without a checkpoint (run.save_last=false), "
            "and a run is never overwritten: start again elsewhere with --out --set run.save_last=true"
        )


def _rename_metrics(
    directory: RunDirectory, records: Records, first: int
) -> tuple[str, ...]:
    """Rename the metrics of a run that was killed before its first save; return notices.

    `first`: steps before its own.
    """
    again = f"starts again at step {first}"
    if not (records.steps or records.broken):
        return (f"no save in {directory.path} was ever complete: it {again}",)
    aside = unused_name(directory.metrics_jsonl)
    directory.metrics_jsonl.rename(aside)
    last = records.steps[-1].step if records.steps else 0
    ended = (
        f"it ended after step {last}, before its first save was complete, and {again}"
    )
    return (f"{ended}; what it recorded is kept in {aside.name}",)


def _refuse_strangers(directory: RunDirectory) -> None:
    """Refuse a directory with files that are no run's."""
    if directory.recipe_yaml.exists():
        return
    own = []
    if not any(directory.checkpoints.glob("*")):
        own = [directory.checkpoints.name]
    if directory.lock_file.exists():  # a start was killed before it wrote recipe.yaml
        own += [directory.original_yaml.name, directory.ds_config_given.name]
    names = sorted(entry.name for entry in directory.path.iterdir())
    strangers = [
        name for name in names if not left_by_a_crash(name) and name not in own
    ]
    if strangers:
        raise ValueError(
            f"{directory.path} holds {counted(len(strangers), 'file')} such as {strangers[0]}, but no run: "
            "there is no recipe.yaml, and a run starts in a new or empty directory; name another with --out"
        )


def _notices_of_changes(saved: Plan, plan: Plan) -> tuple[str, ...]:
    """Return notices of all differences between this launch and the one before."""
    # Through JSON, since a saved plan has lists where a new one has tuples.
    there, now = (json.loads(json.dumps(plan_to_json(each))) for each in (saved, plan))
    facts = differences(there, now, FACTS)
    facts += changes(saved.recipe, plan.recipe, NOTED_BY_RESUME)
    notices = [f"resumed with {key}: {old} -> {new}" for key, old, new in facts]
    config = differences(there["ds"], now["ds"])
    if config:
        listed = "; ".join(f"{key}: {old} -> {new}" for key, old, new in config)
        notices.append(f"resumed with another DeepSpeed configuration: {listed}")
    if plan.precision == "fp16" != saved.precision:
        notices.append("fp16's loss scaler starts afresh, with its initial scale")
    # In attention and in transformers' modules dropout draws other masks under another layout.
    own = plan.recipe.model.implementation
    other = saved.recipe.model.implementation
    dropout = plan.recipe.dropout
    follows_layout = dropout.attention or (dropout.hidden and not own == other == OURS)
    if follows_layout and (own != other or saved.layout != plan.layout):
        notices.append(
            "dropout follows the layout here: the loss curve continues statistically, not to the digit"
        )
    return tuple(notices)
