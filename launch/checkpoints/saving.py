"""Saving a checkpoint: every rank writes its own share, in the background if memory allows it.

A save has three parts. First all ranks copy their state to host memory, and training waits. Then a thread of
each rank writes and flushes its file, and training goes on. The ranks' reports of each step tell whether all
threads are done; then rank 0 writes the manifest and gives the checkpoint its name. So a checkpoint appears
whole or not at all, and a failing disk costs a checkpoint and not the run.

`torch.distributed.checkpoint` (torch 2.13) was considered first. It pickles its metadata, and also its
tensors except by the Hugging Face writer, which has no checksums. It knows pieces as boxes: a run of a flat
ZeRO partition is up to three boxes, and each would be a tensor to plan, save and load.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from data.loader import merge_states
from ds_configs.plan import Plan, plan_facts
from launch.checkpoints import run_checkpoints, tensor_file
from launch.checkpoints.engine_state import EngineState
from launch.checkpoints.manifest import MOMENTS, WEIGHT, Manifest, Piece, Progress, StoredFile, StoredTensor
from launch.checkpoints.placement import Placement
from launch.checkpoints.tensor_file import Entry
from launch.machine import description, memory
from launch.ranks.processes import local_world_size
from launch.records.facts import SaveOutcome, SilentRecorder
from modeling.parallel.process_grid import ProcessGrid

STAGING_BYTES = 256 << 20  # of pinned memory
SPARE = 0.1  # share of a machine's memory that a copy of the state must leave free
Pieces = dict[str, tuple[Placement, Piece]]
Convert = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """One rank's report to rank 0 on its share of a checkpoint."""

    file: StoredFile | None
    pieces: Pieces
    data: dict[str, Any]
    problem: str | None = None


@dataclass
class _Pending:
    """A save in progress. `written`: this rank's file."""

    directory: Path
    progress: Progress
    data: dict[str, Any]
    corpus: str | None
    pieces: Pieces
    written: Future[StoredFile]
    started: float
    blocked: float
    background: bool


class Saver:
    """The saver of one engine's state below `root`. Its methods are collective."""

    def __init__(
        self, state: EngineState, plan: Plan, grid: ProcessGrid, root: Path, listener: SilentRecorder
    ):
        self.state, self.plan, self.grid, self.root, self.listener = state, plan, grid, root, listener
        self.problem: str | None = None  # of the last completed save
        self._pending: _Pending | None = None
        self._warned = False
        self._staging = Staging()
        if grid.rank == 0:
            run_checkpoints.remove_remains(root)

    def save(self, progress: Progress, data: dict[str, Any], corpus: str | None) -> None:
        """Begin a save after the end of the one before.

        `data`: this rank's position in the data; `corpus`: checksum of the training tokens.
        """
        self.finish()
        started = time.perf_counter()
        directory = run_checkpoints.writing_directory(self.root, progress.step)
        if problem := self._on_rank_0(partial(run_checkpoints.begin, self.root, progress.step)):
            took = time.perf_counter() - started
            self._report(SaveOutcome(progress.step, 0, took, took, False, problem))
            return
        entries, pieces = contents(self.state, kinds_after(progress.adam_steps), self.grid.rank)
        background = self._fits([entry.bytes for entry in entries])
        file = directory / file_name(self.grid.rank)
        written: Future[StoredFile] = Future()
        room = sum(entry.bytes for entry in entries) * dist.get_world_size()
        if background:
            entries = [self._staging.copy(entry) for entry in entries]
            threading.Thread(target=_write, args=(file, entries, room, written), daemon=True).start()
        else:
            _write(file, entries, room, written)
        self.state.close()
        blocked = time.perf_counter() - started
        self._pending = _Pending(
            directory, progress, data, corpus, pieces, written, started, blocked, background
        )

    @property
    def written(self) -> bool:
        """Whether a save is in progress of which this rank has written its file."""
        return self._pending is not None and self._pending.written.done()

    def finish(self) -> None:
        """Wait for the save in progress and complete it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        error = pending.written.exception()  # waits
        file = None if error else pending.written.result()
        problem = _reason(error, pending.directory) if error else None
        own = Part(file, pending.pieces, pending.data, problem)
        parts: list[Any] | None = [None] * dist.get_world_size() if self.grid.rank == 0 else None
        dist.gather_object(own, parts, dst=0, group=self.grid.control_group)
        problem = self._on_rank_0(lambda: self._complete(pending, parts or []))
        written = sum(part.file.bytes for part in parts or [] if part.file)
        took = time.perf_counter() - pending.started
        self._report(
            SaveOutcome(pending.progress.step, written, pending.blocked, took, pending.background, problem)
        )

    def _complete(self, pending: _Pending, parts: list[Part]) -> None:
        """Complete the checkpoint on rank 0; on failure remove it and raise OSError or _NotSaved."""
        try:
            problems = [f"rank {rank}: {part.problem}" for rank, part in enumerate(parts) if part.problem]
            if not problems:
                problems = _invisible(pending.directory, parts)
            if problems:
                raise _NotSaved("; ".join(problems[:3]))
            run_checkpoints.complete(pending.directory, self._manifest(pending, parts))
        except (OSError, _NotSaved):
            run_checkpoints.abandon(pending.directory)
            raise
        try:
            run_checkpoints.prune(self.root, self.plan.recipe.run.keep_checkpoints)
        except OSError as error:
            self.listener.say(f"an old checkpoint could not be removed: {error}")

    def _manifest(self, pending: _Pending, parts: list[Part]) -> Manifest:
        files, tensors = assemble(parts)
        return Manifest(
            pending.progress,
            merge_states([part.data for part in parts]),
            pending.corpus,
            self.plan.recipe.model_dump(mode="json", by_alias=True),
            plan_facts(self.plan),
            description.versions(),
            files,
            tensors,
            kinds_after(pending.progress.adam_steps),
            saved=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )

    def _fits(self, sizes: list[int]) -> bool:
        """Check that this machine's memory holds copies of its ranks' entries; if not, say so once."""
        needed, free = sum(sizes) * local_world_size(), memory.available()
        if needed <= free - SPARE * memory.host_memory():
            return True
        if not self._warned:
            self._warned = True
            self.listener.say(
                f"training waits for the disk at each save: the state of this machine's ranks, "
                f"{needed / 1e9:.3g} GB, would be copied to memory to be written meanwhile, and of "
                f"{free / 1e9:.3g} GB that are free a tenth of the machine's memory stays so"
            )
        return False

    def _on_rank_0(self, work: Callable[[], Any]) -> str | None:
        """Do some work with files on rank 0; return the reason of a failure, or None, on every rank."""
        problem = [None] if self.grid.rank else [_problem_of(work, self.root)]
        dist.broadcast_object_list(problem, src=0, group=self.grid.control_group)
        return problem[0]

    def _report(self, saved: SaveOutcome) -> None:
        self.problem = saved.problem
        self.listener.save(saved)


def contents(
    state: EngineState, kinds: Sequence[str], rank: int, convert: Convert | None = None
) -> tuple[list[Entry], Pieces]:
    """Return the entries of `rank`'s file, in the order of its partitions, and their places.

    `convert`: converts the numbers, without a change of shape or type.
    """
    entries: list[Entry] = []
    pieces: Pieces = {}
    for partition in state.partitions:
        for fragment in state.owned(partition):
            place = Placement.of(fragment.parameter)
            assert place.name not in pieces, f"two pieces of {place.name} on one rank"
            pieces[place.name] = place, Piece(file_name(rank), place.cut, fragment.first, fragment.elements)
            for kind in kinds:
                read = partial(state.read, partition, fragment, kind)
                if convert is not None:
                    read = partial(_read_converted, read, convert)
                dtype = state.dtype(partition, kind)
                entries.append(Entry(f"{kind}/{place.name}", dtype, (fragment.elements,), read))
    return entries, pieces


def assemble(parts: Sequence[Part]) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Combine all ranks' parts into files and tensors of a manifest."""
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for rank, part in enumerate(parts):
        assert part.file is not None
        files[file_name(rank)] = part.file
        for name, (place, piece) in part.pieces.items():
            before = tensors[name].pieces if name in tensors else ()
            tensors[name] = StoredTensor(place.shape, (*before, piece), place.form)
    return files, tensors


def kinds_after(adam_steps: int) -> tuple[str, ...]:
    """Return the kinds of tensors to store after so many updates."""
    return (WEIGHT, *MOMENTS) if adam_steps else (WEIGHT,)


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _read_converted(read: Callable[[], torch.Tensor], convert: Convert) -> torch.Tensor:
    return convert(read())


class _NotSaved(Exception):
    """A failure to complete a checkpoint; the message gives the reason."""


class Staging:
    """Pinned memory through which a device's numbers reach the host; the driver's own is a tenth as fast."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def copy(self, entry: Entry) -> Entry:
        """Copy the numbers of an entry to host memory now."""
        numbers, accelerator = entry.read().detach(), get_accelerator()
        held = torch.empty_like(numbers, device="cpu")
        if numbers.device.type == "cpu":
            held.copy_(numbers)
            return Entry(entry.name, entry.dtype, entry.shape, lambda: held)
        if not len(self._pinned):
            self._pinned = accelerator.pin_memory(torch.empty(STAGING_BYTES, dtype=torch.uint8))
        parts = (each.view(-1).view(torch.uint8).split(STAGING_BYTES) for each in (numbers, held))
        for part, place in zip(*parts, strict=True):
            arrived = self._pinned[: len(part)].copy_(part, non_blocking=True)
            accelerator.current_stream().synchronize()
            place.copy_(arrived)
        return Entry(entry.name, entry.dtype, entry.shape, lambda: held)


def _write(path: Path, entries: list[Entry], room: int, written: Future[StoredFile]) -> None:
    """Write this rank's file if the disk has `room` bytes for all ranks' files.

    A full disk would make other writers fail too.
    """
    try:
        if shutil.disk_usage(path.parent).free < room:
            raise OSError(errno.ENOSPC, f"the checkpoint has {room / 1e6:,.3g} MB", str(path.parent))
        written.set_result(tensor_file.write(path, entries))
    except BaseException as error:
        written.set_exception(error)
    entries.clear()


def _invisible(directory: Path, parts: list[Part]) -> list[str]:
    """List the files that rank 0 does not see with the size that their ranks wrote."""
    found = []
    for rank, part in enumerate(parts):
        path = directory / file_name(rank)
        try:
            seen = path.stat().st_size
        except OSError:
            seen = -1
        if part.file and part.file.bytes != seen:
            found.append(
                f"rank 0 does not see {path.name}, which rank {rank} wrote: the run directory (--out) has "
                "to be on a file system that all machines share"
            )
    return found


def _problem_of(work: Callable[[], Any], directory: Path) -> str | None:
    try:
        work()
    except (OSError, _NotSaved) as error:
        return _reason(error, directory)
    return None


def _reason(error: BaseException, directory: Path) -> str:
    """Give the reason why a file could not be written, with the free room."""
    if not isinstance(error, OSError):
        return str(error)
    free = ""
    with contextlib.suppress(OSError):
        there = next(path for path in (directory, *directory.parents) if path.exists())
        free = f", {shutil.disk_usage(there).free / 1e6:,.3g} MB are free"
    return f"{error.filename or directory}: {error.strerror or error}{free}"
