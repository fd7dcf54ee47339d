"""Checkpoints: DeepSpeed's files plus layout-free weights, complete only when a marker says so.

    checkpoints/
      step-000100/            DeepSpeed's shards, weights-stage-NN-part-NNN.safetensors
        complete.json         written last, atomically:
                                step     completed optimizer steps
                                recipe   digest of the recipe
                                layout   degrees and batch identity it was saved under
                                data     position in the data, of all ranks (`data.loader.merge_states`)
                                corpus   checksum of the training tokens; null for a stream
                                files    size in bytes of every other file, by its path below the directory

A run killed at any moment, also while saving, leaves a directory without marker, which resuming ignores. What
is not saved needs no saving: dropout and data order are functions of (seed, step).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt, TypeAdapter

from recipes import files

MARKER = "complete.json"
DAMAGED = "restore it, or move this checkpoint away to resume from the one before"


class Marker(BaseModel):
    """What complete.json holds; the module's docstring says what each entry is."""

    step: NonNegativeInt
    data: dict[str, Any]
    files: dict[str, NonNegativeInt]
    corpus: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    directory: Path
    step: int
    data_state: dict[str, Any]  # position in the data, of all ranks
    corpus: str | None = None  # checksum of the training tokens

    @staticmethod
    def read(directory: Path) -> Checkpoint | None:
        """The checkpoint in `directory`, None without a marker, or with files missing or of another size.

        Raises FileError: a marker that no run has written; which checkpoint is the newest is unknown then.
        """
        path = directory / MARKER
        if not path.is_file() and not path.is_dir():
            return None
        try:
            marker = files.checked(TypeAdapter(Marker), files.read_json_object(path), path)
        except files.FileError as error:
            raise files.FileError(replace(problem, fix=DAMAGED) for problem in error.problems) from None
        sizes = ((directory / name, size) for name, size in marker.files.items())
        whole = all(file.is_file() and file.stat().st_size == size for file, size in sizes)
        return Checkpoint(directory, marker.step, marker.data, marker.corpus) if whole else None


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """Complete checkpoints below `root`, oldest first."""
    return sorted(filter(None, map(Checkpoint.read, root.glob("step-*"))), key=lambda c: c.step)


def newest(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint below `root`, or None."""
    return max(complete_checkpoints(root), key=lambda c: c.step, default=None)
