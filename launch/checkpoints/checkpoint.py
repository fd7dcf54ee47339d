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

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKER = "complete.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    directory: Path
    step: int
    data_state: dict[str, Any]  # position in the data, of all ranks
    corpus: str | None = None  # checksum of the training tokens

    @staticmethod
    def read(directory: Path) -> Checkpoint | None:
        """The checkpoint in `directory`, None without a marker, or with files missing or of another size."""
        try:
            marker = json.loads((directory / MARKER).read_text())
        except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
            return None
        sizes = ((directory / name, size) for name, size in marker["files"].items())
        whole = all(file.is_file() and file.stat().st_size == size for file, size in sizes)
        return Checkpoint(directory, marker["step"], marker["data"], marker.get("corpus")) if whole else None


def complete_checkpoints(root: Path) -> list[Checkpoint]:
    """Complete checkpoints below `root`, oldest first."""
    return sorted(filter(None, map(Checkpoint.read, root.glob("step-*"))), key=lambda c: c.step)


def newest(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint below `root`, or None."""
    return max(complete_checkpoints(root), key=lambda c: c.step, default=None)
