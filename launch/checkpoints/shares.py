"""The share of a rank in a checkpoint: what its file holds, and how shares are joined."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from data.loader import merge_states
from launch.checkpoints import tensor_file
from launch.checkpoints.engine_state import EngineState
from launch.checkpoints.manifest import (
    ListedTensor,
    Manifest,
    Series,
    StoredFile,
    file_name,
    joined,
)
from launch.checkpoints.names import Kind
from launch.checkpoints.stored import TensorPlacement
from launch.checkpoints.sums import sums_of
from launch.checkpoints.tensor_file import TensorEntry

STAGING_BYTES = 256 << 20  # of pinned memory
Tensors = dict[str, ListedTensor]
Sums = dict[str, torch.Tensor]  # by key, (2,) on the device of the tensor


@dataclass(frozen=True)
class Part:
    """The share of a checkpoint of the ranks from `rank` on; `problems`: their first failures."""

    rank: int
    files: dict[str, StoredFile]
    tensors: Tensors
    data: dict[str, Any]
    problems: tuple[str, ...] = ()

    def followed_by(self, other: Part) -> Part:
        """Join the part of the ranks that follow these."""
        tensors = dict(self.tensors)
        for name, tensor in other.tensors.items():
            before = tensors.get(name, replace(tensor, series=(), sums={}))
            sums = dict(before.sums)
            for kind, (plain, weighted) in tensor.sums.items():
                earlier = sums.get(kind, (0.0, 0.0))
                sums[kind] = (earlier[0] + plain, earlier[1] + weighted)
            tensors[name] = replace(
                tensor, series=joined((*before.series, *tensor.series)), sums=sums
            )
        problems = (*self.problems, *other.problems)[:3]
        data = merge_states([self.data, other.data])
        return Part(self.rank, self.files | other.files, tensors, data, problems)


@dataclass
class Pending:
    """A save in progress.

    `held`: the manifest of this rank's share, without versions and files; `written`: this rank's file;
    `sums`: of its tensors by key, once it is written.
    """

    directory: Path
    held: Manifest
    sums: Sums
    written: Future[StoredFile]
    started: float
    blocked: float
    background: bool


def contents(
    state: EngineState, kinds: Sequence[Kind], rank: int, sums: Sums | None = None
) -> tuple[list[TensorEntry], Tensors]:
    """Return the entries of `rank`'s file, in the order of its partitions, and the tensors' pieces in it.

    `sums` gets the sums of each entry when it is copied or written.
    """
    sums = {} if sums is None else sums
    entries: list[TensorEntry] = []
    tensors: Tensors = {}
    for partition in state.partitions:
        for fragment in state.owned(partition):
            place = TensorPlacement.of(fragment.parameter)
            assert place.name not in tensors, f"two pieces of {place.name} on one rank"
            piece = Series(
                rank, place.cut, fragment.first, fragment.elements, fragment.elements
            )
            tensors[place.name] = ListedTensor(place.shape, (piece,), place.form)
            for kind in state.held(partition, kinds):
                read = partial(state.read, partition, fragment, kind)
                dtype = state.dtype(partition, kind)
                shape = (fragment.elements,)
                key = f"{kind}/{place.name}"
                seen = partial(add_up, sums, key, fragment.parameter, fragment.first)
                entries.append(TensorEntry(key, dtype, shape, read, seen))
    return entries, tensors


def add_up(
    sums: Sums,
    key: str,
    parameter: torch.nn.Parameter,
    first: int,
    numbers: torch.Tensor,
) -> None:
    """Add the sums of an entry's numbers, elements of `parameter` from `first` on, to `sums`."""
    sums[key] = sums_of(numbers, parameter, first)


def with_sums(tensors: Tensors, sums: Sums) -> Tensors:
    """Return the tensors with the sums of their pieces."""
    by_name: dict[str, dict[Any, Any]] = {name: {} for name in tensors}
    for key, pair in sums.items():
        kind, _, name = key.partition("/")
        by_name[name][kind] = tuple(pair.tolist())
    return {
        name: replace(tensor, sums=by_name[name]) for name, tensor in tensors.items()
    }


def finite(tensor: ListedTensor) -> ListedTensor:
    """Leave out sums that are not finite, which JSON cannot hold."""
    return replace(
        tensor,
        sums={kind: pair for kind, pair in tensor.sums.items() if isfinite(sum(pair))},
    )


class Staging:
    """Pinned memory through which a device's numbers reach the host; the driver's own is a tenth as fast."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def copy(self, entry: TensorEntry) -> TensorEntry:
        """Copy the numbers of an entry to host memory now."""
        numbers = entry.read().detach()
        accelerator = get_accelerator()
        held = torch.empty_like(numbers, device="cpu")
        if numbers.device.type == "cpu":
            held.copy_(numbers)
            return replace(entry, read=lambda: held)
        entry.seen(numbers)
        if not len(self._pinned):
            plain = torch.empty(STAGING_BYTES, dtype=torch.uint8)
            self._pinned = accelerator.pin_memory(plain)
        parts = (
            each.view(-1).view(torch.uint8).split(STAGING_BYTES)
            for each in (numbers, held)
        )
        for part, place in zip(*parts, strict=True):
            arrived = self._pinned[: len(part)].copy_(part, non_blocking=True)
            accelerator.current_stream().synchronize()
            place.copy_(arrived)
        return TensorEntry(entry.name, entry.dtype, entry.shape, lambda: held)


def write(
    path: Path, entries: list[TensorEntry], room: int, written: Future[StoredFile]
) -> None:
    """Write this rank's file if the disk has `room` bytes for all ranks' files.

    A full disk would make other writers fail too.
    """
    try:
        if shutil.disk_usage(path.parent).free < room:
            raise OSError(
                errno.ENOSPC,
                f"the checkpoint has {room / 1e6:,.3g} MB",
                str(path.parent),
            )
        written.set_result(tensor_file.write(path, entries))
    except BaseException as error:
        written.set_exception(error)
    entries.clear()


def join_visible(directory: Path, ours: Part, theirs: Part) -> Part:
    """Join the part of later ranks, whose first file has to be seen here with the size that was written."""
    name = file_name(theirs.rank)
    try:
        seen = (directory / name).stat().st_size
    except OSError:
        seen = -1
    if name in theirs.files and theirs.files[name].bytes != seen:
        problem = (
            f"rank {ours.rank} does not see {name}, which rank {theirs.rank} wrote: the run directory "
            "(--out) has to be on a file system that all machines share"
        )
        theirs = replace(theirs, problems=(problem, *theirs.problems))
    return ours.followed_by(theirs)
