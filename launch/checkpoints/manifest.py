"""The content of a checkpoint: its manifest, written last.

    step-000100/
      rank-00000.safetensors ...   of each rank what it alone holds: master weights and moments, in pieces
      manifest.json                everything else, and where each piece lies

A piece is a run of consecutive elements of a rank's tensor-parallel slice (`geometry`), stored flat under the
key kind/name, e.g. exp_avg/word.weight. Names are canonical: those of the model in one process.
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
MOMENTS = ("exp_avg", "exp_avg_sq")  # of Adam, by torch's names
MOST_BYTES = 4 * 2**30  # of a manifest: that of 193B parameters on 256 ranks has some 10 MB

Whole = Annotated[int, Field(ge=0)]
Form = Literal["canonical", "transformers"]


@dataclass(frozen=True)
class Piece:
    """Elements [first, first + count) of a slice of a tensor; `cut` None: the slice is all of it."""

    file: str
    cut: Cut | None
    first: Whole
    count: Whole

    def rectangles(self, shape: tuple[int, ...]) -> list[Rectangle]:
        return rectangles(shape, self.cut, self.first, self.count)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: its full, unpadded shape, and the pieces that make it up.

    `form` "transformers": shape and pieces are those of the tensor as GPT2LMHeadModel has it.
    """

    shape: tuple[Whole, ...]
    pieces: tuple[Piece, ...]
    form: Form = "canonical"


@dataclass(frozen=True)
class StoredFile:
    """A file of a checkpoint. `crc32`: of all its bytes, in hexadecimal."""

    bytes: Whole
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]


@dataclass(frozen=True)
class Progress:
    """How far training was, beyond its tensors.

    Attributes:
        step: optimizer steps, skipped ones included.
        adam_steps: updates that the optimizer made; 0: there are no moments yet.
        schedule: steps of the learning rate's schedule.
        skipped: steps that the loss scaler threw away.
        loss_scaler: state of a dynamic fp16 loss scaler; None in other precisions.
    """

    step: Whole
    adam_steps: Whole
    schedule: Whole
    skipped: Whole = 0
    loss_scaler: dict[str, float] | None = None


@dataclass(frozen=True)
class Manifest:
    """The facts that a checkpoint states of itself.

    Attributes:
        data: position in the data, of all ranks (`data.loader.merge_states`).
        corpus: checksum of the training tokens; None for a stream.
        recipe: the resolved recipe, as JSON.
        plan: the rest of the plan it was saved under, without recipe and DeepSpeed configuration.
        versions: of the packages that wrote it.
        files: by name.
        tensors: by canonical name.
        kinds: what is stored of every tensor.
        format: of this file.
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
        """Of all files together."""
        return sum(file.bytes for file in self.files.values())

    def held_by(self, file: str) -> list[str]:
        """Names of the tensors of which `file` holds a piece."""
        return [n for n, tensor in self.tensors.items() if any(p.file == file for p in tensor.pieces)]

    def gaps(self) -> Iterator[str]:
        """Names of tensors whose pieces do not make them up: each element once."""
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
    """The manifest of `directory`. Raises FileError: there is none, or it is damaged."""
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
    """SHA-256 of a manifest's values; it is the manifest's last value."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
