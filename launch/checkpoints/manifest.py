"""The manifest of a checkpoint, which lists its content and is written last.

    step-000100/
      rank-00000.safetensors ...   each rank's share of master weights and moments, in pieces
      manifest.json                all other state, and the place of each piece

A piece is a run of consecutive elements of a rank's tensor-parallel slice (`geometry`), stored flat under the
key kind/name, e.g. exp_avg/word.weight. Names are canonical: the names of the model in one process.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from data.durable_files import write_atomically
from launch.checkpoints.geometry import Cut, Rectangle, overlap, rectangles
from recipes import files

NAME = "manifest.json"
WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of Adam's moments
MOST_BYTES = 4 * 2**30  # of a manifest; 193B parameters on 256 ranks take some 10 MB

Whole = Annotated[int, Field(ge=0)]
Form = Literal["canonical", "transformers"]


@dataclass(frozen=True)
class Piece:
    """Elements [first, first + count) of a slice of a tensor; `cut` None: of the full tensor."""

    file: str
    cut: Cut | None
    first: Whole
    count: Whole

    def rectangles(self, shape: tuple[int, ...]) -> list[Rectangle]:
        return rectangles(shape, self.cut, self.first, self.count)


@dataclass(frozen=True)
class StoredTensor:
    """The full, unpadded shape of a tensor, and its pieces.

    `form` "transformers": shape and pieces are of GPT2LMHeadModel's tensor.
    """

    shape: tuple[Whole, ...]
    pieces: tuple[Piece, ...]
    form: Form = "canonical"


@dataclass(frozen=True)
class StoredFile:
    """Size and checksum of a file of a checkpoint. `crc32`: of all its bytes, in hexadecimal."""

    bytes: Whole
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


@dataclass(frozen=True)
class Progress:
    """The progress of training, without its tensors.

    Attributes:
        step: optimizer steps, with skipped ones.
        adam_steps: updates by the optimizer; 0: there are no moments yet.
        schedule: steps of the learning rate's schedule.
        skipped: steps that the loss scaler dropped.
        loss_scaler: state of a dynamic fp16 loss scaler; None in other precisions.
    """

    step: Whole
    adam_steps: Whole
    schedule: Whole
    skipped: Whole = 0
    loss_scaler: dict[str, float] | None = None


@dataclass(frozen=True)
class Manifest:
    """The facts of a checkpoint: training's state, its origin and its files.

    Attributes:
        data: position in the data, of all ranks (`data.loader.merge_states`).
        corpus: checksum of the training tokens; None for a stream.
        recipe: the resolved recipe, as JSON.
        plan: facts of the plan at the save, without recipe and DeepSpeed configuration.
        versions: versions of the packages that wrote it.
        files: files by name.
        tensors: tensors by canonical name.
        kinds: weight and moments that are stored of every tensor.
        format: version of the manifest's format.
    """

    progress: Progress
    data: dict[str, Any]
    corpus: str | None
    recipe: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, str | None]
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    kinds: tuple[str, ...] = (WEIGHT, *MOMENTS)
    format: Literal[1] = 1
    saved: str = field(default="", compare=False)  # local time

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.bytes for file in self.files.values())

    def held_by(self, file: str) -> list[str]:
        """Return the names of tensors with a piece in `file`."""
        return [n for n, tensor in self.tensors.items() if any(p.file == file for p in tensor.pieces)]

    def gaps(self) -> Iterator[str]:
        """Yield the names of tensors whose pieces do not hold each element once."""
        for name, tensor in self.tensors.items():
            covered = [r for piece in tensor.pieces for r in piece.rectangles(tensor.shape)]
            held = -1 if overlap(covered) else sum(each.elements for each in covered)
            if held != math.prod(tensor.shape) or any(
                piece.file not in self.files for piece in tensor.pieces
            ):
                yield name


FORM = TypeAdapter(Manifest)


def write(manifest: Manifest, directory: Path) -> None:
    """Write the manifest of `directory` atomically, with a checksum of itself."""
    values = asdict(manifest)
    write_atomically(directory / NAME, json.dumps({**values, "sha256": digest(values)}) + "\n")


def read(directory: Path) -> Manifest:
    """Read the manifest of `directory`. Raises FileError if it is missing or damaged."""
    path = directory / NAME
    values = files.read_json_object(path, most=MOST_BYTES)
    told = values.pop("sha256", None)
    if told != digest(values):
        files.refuse(path, "its own checksum is another", "it is written once and never edited")
    found: Manifest = files.checked(FORM, values, path)
    try:
        gaps = list(found.gaps())
    except AssertionError as error:
        files.refuse(path, str(error), "a piece lies within its tensor")
    if gaps:
        files.refuse(
            path, f"the pieces of {gaps[0]} leave gaps or overlap", "they hold each of its elements once"
        )
    return found


def digest(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's values, which is the manifest's last value."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
