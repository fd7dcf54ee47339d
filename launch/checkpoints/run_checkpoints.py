"""The list of a run's checkpoints: finding whole and damaged ones, completing and removing.

    checkpoints/
      step-000100/            whole as soon as it has this name (its form: launch/checkpoints/manifest.py)
      step-000200.writing/    being written, or left behind by a killed run
      step-000050.pruned/     being removed, or left behind by a killed run

The next run removes what a killed run left behind. Dropout and the order of the data are functions of (seed,
step) and need no saving.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from data import durable_files
from launch.checkpoints.names import NAME, step_of
from launch.records.directory import WRITING as WRITING  # for launch/weights, too
from recipes import files
from recipes.problems import Problem, some

if TYPE_CHECKING:
    from launch.checkpoints.manifest import Manifest

PRUNED = ".pruned"
GIVEN = "give a run directory, its checkpoints/, or one step-NNNNNN of them"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a sound manifest and files of the right sizes."""

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return self.manifest.step


@dataclass(frozen=True)
class DamagedCheckpoint:
    """A damaged checkpoint under a whole one's name. `why`: the damage."""

    directory: Path
    why: str

    @property
    def step(self) -> int:
        """The step in the directory's name."""
        return step_of(self.directory) or 0

    def __str__(self) -> str:
        return f"{self.directory} is damaged: {self.why}"


class CheckpointChoice(NamedTuple):
    """The newest whole checkpoint, if there is one. `damaged`: newer ones, the newest first."""

    checkpoint: Checkpoint | None
    damaged: tuple[DamagedCheckpoint, ...] = ()


def directory_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def read(directory: Path, sizes: bool = True) -> Checkpoint | DamagedCheckpoint:
    """Read the manifest of the checkpoint in a directory; `sizes`: check the sizes of its files."""
    from launch.checkpoints import manifest  # most starts find no checkpoint

    try:
        found = Checkpoint(directory, manifest.read(directory))
    except files.FileError as error:
        return DamagedCheckpoint(
            directory, "; ".join(str(problem) for problem in error.problems)
        )
    faults = (
        manifest.size_fault(directory, found.manifest, name)
        for name in found.manifest.files
    )
    fault = next(filter(None, faults), None) if sizes else None
    if fault is None:
        return found
    return DamagedCheckpoint(directory, str(fault))


def named(root: Path) -> list[Path]:
    """Return the directories below `root` that are named as checkpoints, the newest first. Reads no file."""
    every = filter(_is_named, root.glob("step-*"))
    return sorted(every, key=lambda path: (step_of(path) or 0, path), reverse=True)


def _is_named(path: Path) -> bool:
    """Tell by its name whether a directory is a checkpoint, and not a run that someone named so."""
    return step_of(path) is not None and not _is_run(path)


def _is_run(path: Path) -> bool:
    return os.path.exists(path / "recipe.yaml")


def found(root: Path, sizes: bool = True) -> Iterator[Checkpoint | DamagedCheckpoint]:
    """Yield every checkpoint below `root`, the newest first, each `read` only when it is asked for."""
    return (read(directory, sizes) for directory in named(root))


def below(path: Path, step: int | None = None) -> list[Checkpoint | DamagedCheckpoint]:
    """Find the checkpoints of a run directory or its checkpoints/, the newest first, or the one in `path`.

    `step`: only the one after so many steps. Raises FileError if there is none.
    """
    try:
        there = path.is_dir()
    except OSError as error:  # a name too long, no permission
        files.refuse(str(path)[:200], f"cannot be read ({error.strerror})", fix=GIVEN)
    if not there:
        came = "is no directory" if path.exists() else "does not exist"
        files.refuse(path, came, fix=GIVEN)
    if path.name.endswith((WRITING, PRUNED)) and not _is_run(path):
        files.refuse(
            path, "is half written or half removed", "killed runs leave such", GIVEN
        )
    if _is_named(path) or files.is_file(path / NAME):
        every = [read(path)]
    else:
        every = [*found(path / "checkpoints")] or [*found(path)]
    if not every:
        rule = "a run saves step-NNNNNN every run.save_every steps, and at its end with run.save_last"
        fix = GIVEN
        for saved in path.glob("checkpoints/checkpoint-*/config.json"):
            rule = "a fine-tuning has those of transformers' Trainer"
            fix = f"give {saved.parent}, a directory of save_pretrained"
        files.refuse(path, "holds no checkpoint", rule, fix)
    chosen = [each for each in every if step in (None, each.step)]
    if not chosen:
        steps = some([str(each.step) for each in reversed(every)])
        files.refuse(
            path,
            f"holds no checkpoint of step {step}",
            f"only of {steps}",
            "give one of these steps: a run keeps its newest run.keep_checkpoints",
        )
    return chosen


def holds_ours(path: Path) -> bool:
    """Check whether the directory is a run, its checkpoints/, or one checkpoint."""
    try:
        if (path / NAME).exists():
            return True
        if (path / "config.json").exists():  # others, too, call directories step-1000
            return False
        return (
            _is_run(path)
            or (_is_named(path) and path.is_dir())
            or any(map(_is_named, path.iterdir()))
        )
    except (OSError, ValueError):
        return False


def newest_whole(
    path: Path, step: int | None = None
) -> tuple[Checkpoint, tuple[DamagedCheckpoint, ...]]:
    """Return the newest undamaged checkpoint of `below`, held (`hold`), and newer damaged ones.

    Raises FileError if there is none.
    """
    # a run that still trains may prune the first one before it is held
    for _ in range(2):
        whole, damaged = first_whole(below(path, step))
        if whole is not None and hold(whole.directory):
            return whole, damaged
    if whole is not None:
        files.refuse(
            whole.directory,
            "was removed while it was opened, twice",
            "the run keeps run.keep_checkpoints of them",
            "start the command again",
        )
    raise files.FileError(
        [
            Problem(
                str(d.directory),
                "is damaged",
                d.why,
                "restore it, or give another step",
                str(d.directory),
            )
            for d in damaged
        ]
    )


def hold(directory: Path) -> bool:
    """Keep a checkpoint from being pruned until this process ends; return False if that began before."""
    held = directory / NAME
    try:
        # Stays open: the kernel drops its lock with the process.
        fcntl.flock(os.open(held, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    except OSError:
        pass  # a file system without locks
    return held.exists()


def first_whole(every: Iterable[Checkpoint | DamagedCheckpoint]) -> CheckpointChoice:
    """Choose the first undamaged checkpoint; look at none after it."""
    damaged: list[DamagedCheckpoint] = []
    for each in every:
        if isinstance(each, Checkpoint):
            return CheckpointChoice(each, tuple(damaged))
        damaged.append(each)
    return CheckpointChoice(None, tuple(damaged))


def newest(root: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint, or None."""
    return first_whole(found(root)).checkpoint


def begin(directory: Path) -> None:
    """Make the directory in which a checkpoint is written, named `WRITING`. Raises OSError."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def complete(directory: Path, held: Manifest) -> Path:
    """Write the manifest of a checkpoint after its files, and give it its final name. Raises OSError.

    A damaged checkpoint of this name is renamed.
    """
    from launch.checkpoints import manifest

    manifest.write(held, directory)
    place = directory.with_suffix("")
    if place.exists():
        aside = (
            place.with_name(f"{place.name}.damaged-{number}")
            for number in range(1, 10**6)
        )
        os.rename(place, next(path for path in aside if not path.exists()))
    os.rename(directory, place)
    durable_files.sync_names(place.parent)
    return place


def prune(root: Path, keep: int | None) -> None:
    """Remove all checkpoints with a manifest but the newest `keep`; None: remove none. Raises OSError.

    Reads none: the newest was written just now. One that a reader holds is left to the next call.
    """
    whole = [directory for directory in named(root) if (directory / NAME).exists()]
    for old in whole[keep:] if keep else []:
        with open(old / NAME, "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                pass  # a file system without locks
            # Renamed first: a killed removal leaves nothing that looks whole.
            doomed = old.with_suffix(PRUNED)
            os.rename(old, doomed)
            shutil.rmtree(doomed)


def remove_remains(root: Path) -> None:
    """Remove half written and half removed checkpoints of killed runs, under the run directory's lock."""
    for left in (*root.glob(f"step-*{WRITING}"), *root.glob(f"step-*{PRUNED}")):
        shutil.rmtree(left, ignore_errors=True)
