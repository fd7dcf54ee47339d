"""Saving a checkpoint: every rank writes its own share, in the background if memory allows it.

A save has three parts. First all ranks copy their state to host memory, and training waits. Then a thread of
each rank writes and flushes its file, and training goes on. The ranks' reports of each step tell whether all
threads are done; then a tree joins their parts, and rank 0 writes the manifest and names the checkpoint. So a
checkpoint appears whole or not at all, and a failing disk costs a checkpoint, not the run.

`torch.distributed.checkpoint` (torch 2.13) was considered first. It pickles its metadata, and also its
tensors except by the Hugging Face writer, which has no checksums. It knows pieces as boxes: a run of a flat
ZeRO partition is up to three boxes, and each would be a tensor to plan, save and load.
"""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from data.loader import merge_states
from ds_configs.plan import Plan, plan_facts
from launch.checkpoints import run_checkpoints, tensor_file
from launch.checkpoints.engine_state import EngineState
from launch.checkpoints.manifest import (
    Kind,
    KnownLoss,
    ListedTensor,
    Manifest,
    Progress,
    Series,
    StoredFile,
    file_name,
    joined,
    kinds_after,
)
from launch.checkpoints.stored import TensorPlacement
from launch.checkpoints.sums import sums_of
from launch.checkpoints.tensor_file import TensorEntry
from launch.deepspeed_fixes.short_steps import Fragment
from launch.machine import description, memory
from launch.ranks.processes import from_rank_0, local_world_size, merged
from launch.records.directory import WRITING
from launch.records.facts import SaveOutcome, SilentRecorder
from modeling.parallel.process_grid import ProcessGrid
from recipes.problems import amount, system_error, system_problem

STAGING_BYTES = 256 << 20  # of pinned memory
SPARE = 0.1  # share of a machine's memory that a copy of the state must leave free
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
class _Pending:
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


class Saver:
    """The saver of one engine's state below `root`. Its methods are collective."""

    def __init__(
        self,
        state: EngineState,
        plan: Plan,
        grid: ProcessGrid,
        root: Path,
        listener: SilentRecorder,
    ):
        self.state = state
        self.plan = plan
        self.grid = grid
        self.root = root
        self.listener = listener
        self.problem: str | None = None  # of the last completed save
        self._pending: _Pending | None = None
        self._remover = ThreadPoolExecutor(1)  # of old checkpoints, on rank 0
        self._removed: Future[None] | None = None
        self._warned = False
        self._staging = Staging()
        if grid.rank == 0:
            run_checkpoints.remove_remains(root)

    def save(
        self,
        progress: Progress,
        data: dict[str, Any],
        corpus: str,
        known_loss: Callable[[], KnownLoss | None] = lambda: None,
        next_step: int | None = None,
    ) -> None:
        """Begin a save after the end of the one before.

        `data`: this rank's position in the data; `corpus`: checksum of the training tokens; `known_loss`
        computes it.
        """
        self.finish()
        started = time.perf_counter()
        directory = run_checkpoints.directory_of(self.root, progress.step).with_suffix(
            WRITING
        )
        problem = self._on_rank_0(lambda: run_checkpoints.begin(directory))
        if problem:
            took = time.perf_counter() - started
            self._report(SaveOutcome(progress.step, 0, took, took, False, problem))
            return
        kinds = kinds_after(progress.adam_steps)
        known = known_loss()
        sums = Sums()
        entries, tensors = contents(self.state, kinds, self.grid.rank, sums)
        sizes = [entry.bytes for entry in entries]
        background = self._fits(sizes)
        file = directory / file_name(self.grid.rank)
        written: Future[StoredFile] = Future()
        room = sum(sizes) * dist.get_world_size()
        if background:
            entries = [self._staging.copy(entry) for entry in entries]
            threading.Thread(
                target=_write, args=(file, entries, room, written), daemon=True
            ).start()
        else:
            _write(file, entries, room, written)
        self.state.close()
        held = Manifest(
            progress,
            data,
            corpus,
            self.plan.recipe.as_data(),
            plan_facts(self.plan),
            {},
            {},
            tensors,
            kinds,
            known,
            next_step,
        )
        blocked = time.perf_counter() - started
        self._pending = _Pending(
            directory, held, sums, written, started, blocked, background
        )

    @property
    def written(self) -> bool:
        """Whether a save is in progress of which this rank has written its file."""
        return self._pending is not None and self._pending.written.done()

    def finish(self) -> None:
        """Wait for the save in progress, complete it, and wait until old checkpoints are removed."""
        self.complete()
        if self._removed and (error := self._removed.exception()):
            self.listener.say(f"an old checkpoint could not be removed: {error}")
        self._removed = None

    def complete(self) -> None:
        """Wait for the save in progress, and complete it."""
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        error = pending.written.exception()  # waits
        rank = self.grid.rank
        files = {} if error else {file_name(rank): pending.written.result()}
        problems = (
            (f"rank {rank}: {_reason(error, pending.directory)}",) if error else ()
        )
        own = Part(
            rank,
            files,
            with_sums(pending.held.tensors, pending.sums),
            pending.held.data,
            problems,
        )
        whole = merged(
            own,
            partial(_join_visible, pending.directory),
            self.grid.control_group,
            Part,
        )
        problem = self._on_rank_0(lambda: self._complete(pending, whole))
        written = sum(file.bytes for file in whole.files.values())
        took = time.perf_counter() - pending.started
        self._report(
            SaveOutcome(
                pending.held.step,
                written,
                pending.blocked,
                took,
                pending.background,
                problem,
            )
        )

    def discard(self) -> None:
        """Remove the save in progress, whose numbers are wrong."""
        if self._pending is None:
            return
        pending = self._pending
        self._pending = None
        pending.written.exception()  # waits
        dist.barrier(group=self.grid.control_group)
        self._on_rank_0(lambda: shutil.rmtree(pending.directory, ignore_errors=True))

    def _complete(self, pending: _Pending, whole: Part) -> str | None:
        """Complete the checkpoint on rank 0; on failure remove it, and raise OSError or return the reason."""
        try:
            if whole.problems:
                return "; ".join(whole.problems)
            held = replace(
                pending.held,
                data=whole.data,
                versions=description.versions(),
                files=whole.files,
                tensors={name: finite(each) for name, each in whole.tensors.items()},
                saved=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            )
            run_checkpoints.complete(pending.directory, held)
        finally:  # it has another name if it is whole
            shutil.rmtree(pending.directory, ignore_errors=True)
        kept = self.plan.recipe.run.keep_checkpoints
        self._removed = self._remover.submit(run_checkpoints.prune, self.root, kept)
        return None

    def _fits(self, sizes: list[int]) -> bool:
        """Check that this machine's memory holds copies of its ranks' entries; if not, say so once."""
        needed = sum(sizes) * local_world_size()
        free = memory.available()
        if needed <= free - SPARE * memory.host_memory():
            return True
        if not self._warned:
            self._warned = True
            self.listener.say(
                f"training waits for the disk at each save: the state of this machine's ranks, "
                f"{amount(needed)}, would be copied to memory to be written meanwhile, and of "
                f"{amount(free)} that are free a tenth of the machine's memory stays so"
            )
        return False

    def _on_rank_0(self, work: Callable[[], str | None]) -> str | None:
        """Do some work with files on rank 0; return the reason of a failure, or None, on every rank."""
        problem = None
        if self.grid.rank == 0:
            try:
                problem = work()
            except OSError as error:
                problem = _reason(error, self.root)
        return from_rank_0(problem, self.grid.control_group)

    def _report(self, saved: SaveOutcome) -> None:
        self.problem = saved.problem
        self.listener.save(saved)


def contents(
    state: EngineState, kinds: Sequence[Kind], rank: int, sums: Sums | None = None
) -> tuple[list[TensorEntry], Tensors]:
    """Return the entries of `rank`'s file, in the order of its partitions, and the tensors' pieces in it.

    `sums` gets the sums of each entry when it is copied or written.
    """

    def add_up(key: str, fragment: Fragment, numbers: torch.Tensor) -> None:
        if sums is not None:
            sums[key] = sums_of(numbers, fragment.parameter, fragment.first)

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
                key = f"{kind}/{place.name}"
                entries.append(
                    TensorEntry(
                        key,
                        dtype,
                        (fragment.elements,),
                        read,
                        partial(add_up, key, fragment),
                    )
                )
    return entries, tensors


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
            self._pinned = accelerator.pin_memory(
                torch.empty(STAGING_BYTES, dtype=torch.uint8)
            )
        parts = (
            each.view(-1).view(torch.uint8).split(STAGING_BYTES)
            for each in (numbers, held)
        )
        for part, place in zip(*parts, strict=True):
            arrived = self._pinned[: len(part)].copy_(part, non_blocking=True)
            accelerator.current_stream().synchronize()
            place.copy_(arrived)
        return TensorEntry(entry.name, entry.dtype, entry.shape, lambda: held)


def _write(
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


def _join_visible(directory: Path, ours: Part, theirs: Part) -> Part:
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


def _reason(error: BaseException, directory: Path) -> str:
    """Give the reason why a file could not be written, with the fix that cures it."""
    refusal = system_error(error)
    if refusal is None:
        return str(error)
    fewer = "keep fewer checkpoints (--set run.keep_checkpoints=2)"
    return str(system_problem(refusal, directory, fewer))
