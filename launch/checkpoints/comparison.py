"""Comparison of two checkpoints, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from launch.checkpoints.inspection import SHOWN
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.checkpoints.stored import StoredTensors
from launch.checkpoints.tensor_file import BUCKET, DTYPES
from recipes import files
from recipes.problems import Problem, ProblemsError, some


def dtypes(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Map each tensor and kind to its type, from the headers of the files. Raises FileError."""
    found: dict[str, dict[str, str]] = {name: {} for name in checkpoint.manifest.tensors}
    for file in checkpoint.manifest.files:
        for key, tensor in files.read_safetensors_header(checkpoint.directory / file).items():
            kind, _, name = key.partition("/")
            if name in found:
                found[name][kind] = str(DTYPES.get(tensor.dtype, tensor.dtype)).removeprefix("torch.")
    return found


@dataclass(frozen=True)
class Difference:
    """The difference of a tensor of one kind between two checkpoints.

    Attributes:
        absolute: the largest difference of an element.
        relative: `absolute` divided by the largest magnitude of an element in either.
        equal: the tensors are equal to the last bit.
    """

    tensor: str
    kind: str
    absolute: float
    relative: float
    equal: bool


def differences(
    first: Checkpoint, second: Checkpoint, seen: Callable[[str], None] = lambda name: None
) -> Iterator[Difference]:
    """Yield the difference of every tensor of the common kinds; call `seen` with the next tensor's name.

    Raises ProblemsError with all tensors of only one checkpoint or of different shapes.
    """
    ours, theirs = (StoredTensors(each.directory, each.manifest) for each in (first, second))
    if problems := list(_model_differences(ours, theirs)):
        raise ProblemsError(problems)
    for kind in (kind for kind in first.manifest.kinds if kind in second.manifest.kinds):
        for name in ours:
            seen(f"{kind}/{name}")
            yield _difference(name, kind, ours.canonical(name, kind), theirs.canonical(name, kind))


def _model_differences(ours: StoredTensors, theirs: StoredTensors) -> Iterator[Problem]:
    where, rule = f"{ours.directory} and {theirs.directory}", "only checkpoints of one model are compared"
    for one, other in ((ours, theirs), (theirs, ours)):
        if alone := [name for name in one if name not in other]:
            yield Problem("", f"only {one.directory} has {some(alone, SHOWN)}", rule, where=where)
    both = ((name, ours.shape(name), theirs.shape(name)) for name in ours if name in theirs)
    if shapes := [f"{name} {list(a)} and {list(b)}" for name, a, b in both if a != b]:
        yield Problem("", f"their shapes are other ones: {some(shapes, SHOWN)}", rule, where=where)


def _difference(name: str, kind: str, one: torch.Tensor, other: torch.Tensor) -> Difference:
    """Compare two float32 tensors, a bucket at a time."""
    if torch.equal(one.view(torch.int32), other.view(torch.int32)):
        return Difference(name, kind, 0.0, 0.0, True)
    absolute = largest = torch.zeros(())
    for a, b in zip(one.view(-1).split(BUCKET // 4), other.view(-1).split(BUCKET // 4), strict=True):
        absolute = torch.maximum(absolute, (a - b).abs().max())  # NaN stays
        largest = torch.maximum(largest, torch.maximum(a.abs().max(), b.abs().max()))
    relative = absolute / largest if largest else absolute
    return Difference(name, kind, float(absolute), float(relative), False)
