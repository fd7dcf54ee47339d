"""The tensors of a checkpoint, read whole or by pieces, without a process group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from launch.checkpoints import manifest
from launch.checkpoints.geometry import Copy, Cut, copies, rectangles
from launch.checkpoints.names import WEIGHT
from launch.checkpoints.tensor_file import DTYPES, Reader
from modeling.initialization import Shard, canonical_name, padded_slice, shard_of
from recipes import files
from recipes.schema import Recipe

if TYPE_CHECKING:
    from modeling.formats.huggingface.conversion import Form as Conversion

MOST_READ = 2**22  # elements in one read
MOST_OPEN = 64  # files at once: a checkpoint has one for each rank that wrote it


class TensorPlacement(NamedTuple):
    """A slice of a full tensor; `shape`: of the full tensor, unpadded; `cut` None: all of it."""

    name: str
    form: manifest.Form
    shape: tuple[int, ...]
    cut: Cut | None

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> TensorPlacement:
        """Return the place of a parameter with a label by `modeling.initialization.label`."""
        name = canonical_name(parameter)
        shard = shard_of(parameter)
        # ZeRO-3 leaves an empty tensor behind.
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        form: manifest.Form = "canonical"
        cut = None
        if isinstance(shard, Shard):
            length = shape[shard.dim]
            shape = (*shape[: shard.dim], shard.entries, *shape[shard.dim + 1 :])
            cut = Cut(shard.dim, shard.rank * length, length)
        elif shard is not None and not shard.is_canonical:
            form = "transformers"
        return cls(name, form, shape, cut)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """Cut the slice from a full tensor; padding is zero."""
        if self.cut is None:
            return full
        return padded_slice(full, *self.cut)


class StoredTensors(Mapping[str, torch.Tensor]):
    """A map of a checkpoint's tensors of one kind, read on access: full, canonical, float32."""

    def __init__(
        self, directory: Path, held: manifest.Manifest | None = None, kind: str = WEIGHT
    ):
        """Open the checkpoint; `held`: its manifest, if it was read. Raises FileError."""
        self.directory = directory
        self.kind = kind
        self.manifest = held or manifest.read(directory)
        self._readers: dict[str, Reader] = {}
        # of them, that which was used last at the end
        self._open: dict[str, Reader] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __len__(self) -> int:
        return len(self.manifest.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.tensors  # Mapping's own would read it

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.canonical(name, self.kind)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full canonical tensor."""
        stored = self.manifest.tensors[name]
        if stored.form == "canonical":
            return stored.shape
        form, heads = self._forms[name]
        return tuple(
            form.to_ours([torch.empty(stored.shape, device="meta")], heads).shape
        )

    def canonical(self, name: str, kind: str) -> torch.Tensor:
        """Read the full canonical tensor in float32. Raises KeyError for an unknown name."""
        stored = self.manifest.tensors[name]
        full = torch.empty(stored.shape, dtype=torch.float32)
        place = TensorPlacement(name, stored.form, stored.shape, None)
        self._copy(full.view(-1), place, 0, kind)
        if stored.form == "canonical":
            return full
        form, heads = self._forms[name]
        return form.to_ours([full], heads).contiguous()

    def dtype(self, name: str, kind: str) -> torch.dtype:
        """Return the type of a tensor's stored numbers."""
        first = self.manifest.tensors[name].series[0]
        return DTYPES[self._reader(first.file).tensors[f"{kind}/{name}"].dtype]

    def fill(
        self, target: torch.Tensor, place: TensorPlacement, first: int, kind: str
    ) -> None:
        """Fill flat `target` with the elements of the slice `place` from `first` on; padding becomes zero.

        Reads only these elements if the tensor is stored in the form of `place`, else the whole tensor. Rows
        of positions that are not stored are left as they are.
        Raises FileError for a missing tensor or another shape.
        """
        stored = self.manifest.tensors.get(place.name)
        if stored is None:
            files.refuse(self.directory, f"holds no {place.name}", "the model has it")
        full = None
        shape = stored.shape
        if stored.form != place.form:
            full = self.canonical(place.name, kind)
            if place.form == "transformers":
                form, heads = self._forms[place.name]
                (full,) = form.to_theirs(full, heads)
            shape = tuple(full.shape)
        if _has_grown(place, shape):
            known = math.prod(shape) - first
            if known <= 0:
                return
            target = target[:known]
            place = place._replace(shape=shape)
        if shape != place.shape:
            files.refuse(
                self.directory,
                f"{place.name} has shape {list(shape)}",
                f"the model's has {list(place.shape)}",
            )
        if full is None:
            self._copy(target, place, first, kind)
        else:
            target.copy_(
                place.slice_of(full).reshape(-1)[first : first + target.numel()]
            )

    def _copy(
        self, target: torch.Tensor, place: TensorPlacement, first: int, kind: str
    ) -> None:
        """Fill as `fill` does from a tensor in the form and shape of `place`."""
        shape = place.shape
        wanted = rectangles(shape, place.cut, first, target.numel())
        if sum(each.elements for each in wanted) < target.numel():
            target.zero_()
        key = f"{kind}/{place.name}"
        for part, series in product(wanted, self.manifest.tensors[place.name].series):
            for piece in series.pieces_around(shape, part):
                for copy in copies(piece.rectangles(shape), [part]):
                    self._copy_rectangle(target, piece.file, key, copy)

    def _copy_rectangle(
        self, target: torch.Tensor, file: str, key: str, copy: Copy
    ) -> None:
        source = self._reader(file)
        step = max(1, MOST_READ // copy.source_stride)
        for row in range(0, copy.rows, step):
            rows = min(step, copy.rows - row)
            start = copy.source + row * copy.source_stride
            read = source.elements(
                key, start, (rows - 1) * copy.source_stride + copy.columns
            )
            part = read.as_strided((rows, copy.columns), (copy.source_stride, 1))
            at = target.storage_offset() + copy.target + row * copy.target_stride
            target.as_strided((rows, copy.columns), (copy.target_stride, 1), at).copy_(
                part
            )

    def _reader(self, file: str) -> Reader:
        if file not in self._readers:
            self._readers[file] = Reader(self.directory / file)
        self._open.pop(file, None)
        self._open[file] = self._readers[file]
        if len(self._open) > MOST_OPEN:
            oldest = next(iter(self._open))
            self._open.pop(oldest).close()
        return self._open[file]

    @cached_property
    def _forms(self) -> dict[str, tuple[Conversion, int]]:
        """The conversions of `transformers` tensors (GPT-2 under Trainer) to canonical ones."""
        from modeling.formats.huggingface import gpt2

        model = Recipe.model_validate(self.manifest.recipe).model
        return {e.ours: (e.form, model.heads) for e in gpt2.name_map(model)}


def _has_grown(place: TensorPlacement, stored: tuple[int, ...]) -> bool:
    """Check for a table of positions with more rows than are stored."""
    same_width = place.cut is None and place.shape[1:] == stored[1:]
    return same_width and "position" in place.name and place.shape[0] > stored[0]
