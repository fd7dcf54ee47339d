"""The training batches of a rank; of a stream, one rank of each model copy reads for all of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from data.corpus import Corpus
from data.loader import MicroBatch, StepBatches, pin_batches
from data.samples.fields import TrainingSamples
from ds_configs.plan import Plan
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks import processes
from launch.ranks.processes import gathered
from launch.training.early_ends import BrokenData
from modeling.parallel.process_grid import ProcessGrid
from recipes.layout import Layout
from recipes.rank_order import model_groups


def training_batches(
    plan: Plan, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None
) -> StepBatches:
    """Make this rank's training micro-batches, one step's per `next`, after the checkpoint. Collective."""
    if corpus.train.random_access:  # mapped tokens, in which nothing can be broken
        return StepBatches(*_batch_arguments(plan, corpus, grid, checkpoint, plan.recipe.run.loader_workers))
    return StreamBatches(plan, corpus, grid, checkpoint)


def _batch_arguments(
    plan: Plan, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None, workers: int
) -> tuple[TrainingSamples, int, Layout, int, int, dict[str, Any] | None, int, bool]:
    """Return the arguments of StepBatches."""
    start, state = (checkpoint.step, checkpoint.data_state) if checkpoint else (0, None)
    pinned = processes.device().own_memory
    return corpus.train, plan.recipe.seed, plan.layout, grid.at.dp, start, state, workers, pinned


class StreamBatches(StepBatches):
    """Batches of a stream: one rank of each model copy reads and tokenizes for its whole copy.

    If one rank cannot read a step's batches, no rank gets them.
    """

    def __init__(self, plan: Plan, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None):
        """Start the batches of this rank; run.loader_workers threads if it reads. Collective."""
        self._all_ranks = grid.control_group
        self._copy, self._reader = _copy_group(grid)
        self._reads = grid.rank == self._reader
        workers = plan.recipe.run.loader_workers if self._reads else 0
        super().__init__(*_batch_arguments(plan, corpus, grid, checkpoint, workers))
        self._before: dict[str, Any] | None = None  # state before a step that is being fetched

    def __next__(self) -> list[MicroBatch]:
        """Fetch the next step. Collective. Raises BrokenData on all ranks, and then keeps the `state`."""
        problem, self._before = None, super().state()
        found: list[MicroBatch] = []
        try:
            found = super().__next__() if self._reads else []
        except (ValueError, OSError) as error:
            problem = str(error)
        failed = torch.tensor(problem is not None)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._all_ranks)
        if failed:
            said = dict.fromkeys(filter(None, gathered(problem, self._all_ranks)))  # ranks may share a lane
            raise BrokenData("\n".join(said))
        self._before = None
        return found if self._copy is None else self._share(found)

    def _share(self, found: list[MicroBatch]) -> list[MicroBatch]:
        """Send the reading rank's batches and the state after them to all ranks of its copy."""
        sent: list[Any] = [(found, self._state)]
        dist.broadcast_object_list(sent, src=self._reader, group=self._copy)
        if self._reads:
            return found
        ((found, self._state),), self.step = sent, self.step + 1
        return pin_batches(found) if self._pinned else found

    def state(self) -> dict[str, Any]:
        return self._before or super().state()


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
    made = [dist.new_group(ranks, backend="gloo", timeout=grid.timeout) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if grid.rank in ranks), own[0]
