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

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ds_configs.plan import Plan, plan_facts
from launch.checkpoints import run_checkpoints
from launch.checkpoints.engine_state import EngineState
from launch.machine import description, memory
from launch.ranks.processes import from_rank_0, local_world_size, merged
from launch.records.directory import WRITING
from launch.records.facts import SaveOutcome, SilentRecorder
from modeling.parallel.process_grid import ProcessGrid
from recipes.problems import amount, system_error, system_problem

if TYPE_CHECKING:
    from launch.checkpoints.manifest import KnownLoss, Progress, StoredFile
    from launch.checkpoints.shares import Part, Pending, Staging

SPARE = 0.1  # share of a machine's memory that a copy of the state must leave free


@dataclass
class Saver:
    """The saver of one engine's state below `root`. Its methods are collective."""

    state: EngineState
    plan: Plan
    grid: ProcessGrid
    root: Path
    listener: SilentRecorder

    def __post_init__(self) -> None:
        self.problem: str | None = None  # of the last completed save
        self._pending: Pending | None = None
        self._remover = ThreadPoolExecutor(1)  # of old checkpoints, on rank 0
        self._removed: Future[None] | None = None
        self._warned = False
        self._staging: Staging | None = None
        if self.grid.rank == 0:
            run_checkpoints.remove_remains(self.root)

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
        # with tensors and files, which no first step needs
        from launch.checkpoints import manifest, shares

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
        kinds = manifest.kinds_after(progress.adam_steps)
        known = known_loss()
        sums = shares.Sums()
        entries, tensors = shares.contents(self.state, kinds, self.grid.rank, sums)
        sizes = [entry.bytes for entry in entries]
        background = self._fits(sizes)
        file = directory / manifest.file_name(self.grid.rank)
        written: Future[StoredFile] = Future()
        room = sum(sizes) * dist.get_world_size()
        if background:
            self._staging = self._staging or shares.Staging()
            entries = [self._staging.copy(entry) for entry in entries]
            threading.Thread(
                target=shares.write, args=(file, entries, room, written), daemon=True
            ).start()
        else:
            shares.write(file, entries, room, written)
        self.state.close()
        held = manifest.Manifest(
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
        self._pending = shares.Pending(
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
        from launch.checkpoints import manifest, shares

        pending = self._pending
        self._pending = None
        error = pending.written.exception()  # waits
        rank = self.grid.rank
        files = {} if error else {manifest.file_name(rank): pending.written.result()}
        problems = (
            (f"rank {rank}: {_reason(error, pending.directory)}",) if error else ()
        )
        own = shares.Part(
            rank,
            files,
            shares.with_sums(pending.held.tensors, pending.sums),
            pending.held.data,
            problems,
        )
        whole = merged(
            own,
            partial(shares.join_visible, pending.directory),
            self.grid.control_group,
            shares.Part,
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

    def _complete(self, pending: Pending, whole: Part) -> str | None:
        """Complete the checkpoint on rank 0; on failure remove it, and raise OSError or return the reason."""
        from launch.checkpoints.shares import finite

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


def _reason(error: BaseException, directory: Path) -> str:
    """Give the reason why a file could not be written, with the fix that cures it."""
    refusal = system_error(error)
    if refusal is None:
        return str(error)
    fewer = "keep fewer checkpoints (--set run.keep_checkpoints=2)"
    return str(system_problem(refusal, directory, fewer))
