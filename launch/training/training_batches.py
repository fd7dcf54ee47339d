"""The training batches of a rank; of a stream, one rank of each model copy reads for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data.bit_sums import batch_sum
from data.corpus import Corpus
from data.loader import MicroBatch, StepBatches, micro_batch, pin_batches, rank_rows
from ds_configs.plan import Plan
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks import processes
from launch.ranks.processes import gathered
from launch.training.early_ends import BrokenData
from modeling.parallel.process_grid import ProcessGrid
from recipes.rank_order import model_groups


def training_batches(
    plan: Plan, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None
) -> StepBatches:
    """Make this rank's training micro-batches, one step's per `next`, after the checkpoint. Collective."""
    recipe = plan.recipe
    pinned = processes.device().own_memory
    how: dict[str, Any] = dict(
        samples=corpus.train, seed=recipe.seed, layout=plan.layout, dp_rank=grid.at.dp
    )
    how |= dict(
        workers=recipe.run.loader_workers, pinned=pinned, sizes=recipe.sizes_in_data
    )
    if checkpoint:
        how |= dict(start_step=checkpoint.step)
        # a branch with other data is at their beginning
        if recipe.sizes_in_data.samples(checkpoint.step):
            how |= dict(start_state=checkpoint.manifest.data)
    if corpus.train.random_access:  # mapped tokens, in which nothing can be broken
        return StepBatches(**how)
    micro = plan.layout.micro
    form = micro_batch(corpus.validation.take([0] * micro), np.zeros(micro))
    return StreamBatches(grid, form, **how)


class StreamBatches(StepBatches):
    """Batches of a stream: one rank of each model copy reads and tokenizes for its whole copy.

    The loop fetches each step while the one before is computed, and the ranks tell each other of a failure in
    the message that ends a step: either all of them begin the next one, or none.
    """

    def __init__(
        self, grid: ProcessGrid, form: MicroBatch, *, workers: int, **how: Any
    ) -> None:
        """Start the batches of this rank, with `workers` threads if it reads. Collective.

        `form`: a micro-batch in the form of all; the others: as in `StepBatches`.
        """
        self._all_ranks = grid.control_group
        self._like = form
        self._copy, self._reader = _copy_group(grid)
        self._reads = grid.rank == self._reader
        super().__init__(workers=workers if self._reads else 0, **how)
        self._fetched: tuple[list[MicroBatch], dict[str, Any] | None, int] | None = None
        self._packed = torch.empty(0, dtype=torch.uint8)
        self._arrival: dist.Work | None = None

    def fetch(self) -> str | None:
        """Read the next step, and begin to send it to this copy's ranks; return why that fails."""
        count = len(rank_rows(self._layout, 0, self._sizes.size(self.step)))
        problem = None
        self._fetched = ([self._like] * count, None, 0)
        try:
            if self._reads:
                self._fetched = self._take()
        except MemoryError:
            raise
        # of threads, tokenizers, file systems, networks: each has its own
        except Exception as error:
            known = isinstance(error, ValueError | OSError)
            problem = str(error) if known else f"{type(error).__name__}: {error}"
        # the others wait for something, also where there is nothing to read
        if self._copy is not None:
            self._packed = _packed(self._fetched[0])
            self._arrival = dist.broadcast(
                self._packed, self._reader, self._copy, async_op=True
            )
        return problem

    def __next__(self) -> list[MicroBatch]:
        """Hand out the fetched step; fetch a launch's first one. Collective.

        Raises BrokenData on all ranks if one of them cannot read that first step.
        """
        if self._fetched is None:
            end_together(self.fetch(), self._all_ranks)
        assert self._fetched is not None
        (self.last, self._state, self.bit_sum), self._fetched = self._fetched, None
        self.step += 1
        if self._arrival is not None:
            self._arrival.wait()
        if not self._reads:
            received = _unpacked(self._packed, self.last)
            self.last = pin_batches(received) if self._pinned else received
            self.bit_sum = int(batch_sum(received))
        return self.last


def end_together(problem: str | None, group: dist.ProcessGroup) -> None:
    """Raise BrokenData on all ranks if there is a `problem` on any, with all of them. Collective."""
    # ranks may share a lane
    problems = dict.fromkeys(filter(None, gathered(problem, group)))
    if problems:
        raise BrokenData("\n".join(problems))


def _packed(batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Pack the bytes of a step's micro-batches into one tensor."""
    return torch.cat(
        [x.view(-1).view(torch.uint8) for batch in batches for x in batch.values()]
    )


def _unpacked(packed: torch.Tensor, like: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches of `_packed`, in the form of those that are `like` them."""
    parts = iter(packed.split([x.nbytes for batch in like for x in batch.values()]))
    # Copies, since a view of another type has to begin at a multiple of its size.
    return [
        {
            name: next(parts).clone().view(x.dtype).view(x.shape)
            for name, x in batch.items()
        }
        for batch in like
    ]


def _copy_group(grid: ProcessGrid) -> tuple[dist.ProcessGroup | None, int]:
    """Return the group of ranks of this model copy, and its reading rank. Collective.

    The group is None if a copy is one rank.
    """
    groups = model_groups(grid.tp, grid.pp, grid.dp)
    own = next(ranks for ranks in groups if grid.rank in ranks)
    if len(own) == 1:
        return None, grid.rank
    if len(groups) == 1:
        return grid.control_group, own[0]
    # Among its members alone: under NCCL a rank that stays outside splits the whole world for each group.
    made = dist.new_group(own, grid.timeout, "gloo", use_local_synchronization=True)
    return made, own[0]
