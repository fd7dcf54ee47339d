"""The training batches of a rank: of stored tokens by itself, of a stream by one rank for several."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from data.corpus import Corpus
from data.loader import MicroBatch, StepBatches, pinned
from data.samples.fields import TrainingSamples
from ds_configs.plan import Plan
from launch.checkpoints.run_checkpoints import Checkpoint
from launch.ranks.processes import gathered
from launch.training.early_ends import BrokenData
from modeling.parallel.process_grid import ProcessGrid
from recipes.layout import Layout
from recipes.rank_order import model_groups


def training_batches(
    plan: Plan, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None
) -> StepBatches:
    """This rank's micro-batches of the training text, a step's at each `next`, from the checkpoint on.

    Collective.
    """
    if corpus.train.random_access:  # mapped tokens, in which nothing can be broken
        return StepBatches(*_place(plan, corpus, grid, checkpoint), plan.recipe.run.loader_workers)
    return StreamBatches(plan, corpus, grid, checkpoint)


def _place(
    plan: Plan, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None
) -> tuple[TrainingSamples, int, Layout, int, int, dict[str, Any] | None]:
    """The arguments of StepBatches, without its workers."""
    start, state = (checkpoint.step, checkpoint.data_state) if checkpoint else (0, None)
    return corpus.train, plan.recipe.seed, plan.layout, grid.at.dp, start, state


class StreamBatches(StepBatches):
    """Batches of a stream: one rank of each model copy reads and tokenizes for all of that copy.

    All ranks get those of a step, or none does, where one of them cannot be read.
    """

    def __init__(self, plan: Plan, corpus: Corpus, grid: ProcessGrid, checkpoint: Checkpoint | None):
        """Make batches of one rank, with run.loader_workers threads where it reads. Collective."""
        self._everyone = grid.control_group
        self._copy, self._reader = _of_one_copy(grid)
        self._reads = grid.rank == self._reader
        workers = plan.recipe.run.loader_workers if self._reads else 0
        super().__init__(*_place(plan, corpus, grid, checkpoint), workers)
        self._before: dict[str, Any] | None = None  # state before a step that is being fetched

    def __next__(self) -> list[MicroBatch]:
        """Collective. Raises BrokenData on all ranks; `state` stays that of the last step handed out."""
        problem, self._before = None, super().state()
        found: list[MicroBatch] = []
        try:
            found = super().__next__() if self._reads else []
        except (ValueError, OSError) as error:
            problem = str(error)
        failed = torch.tensor(problem is not None)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self._everyone)
        if failed:
            said = dict.fromkeys(filter(None, gathered(problem, self._everyone)))  # ranks may share a lane
            raise BrokenData("\n".join(said))
        self._before = None
        return found if self._copy is None else self._shared(found)

    def _shared(self, found: list[MicroBatch]) -> list[MicroBatch]:
        """The reading rank's batches, on all ranks of its copy, with the state after them."""
        sent: list[Any] = [(found, self._state)]
        dist.broadcast_object_list(sent, src=self._reader, group=self._copy)
        if self._reads:
            return found
        ((found, self._state),), self.step = sent, self.step + 1
        return [pinned(batch) for batch in found]

    def state(self) -> dict[str, Any]:
        return self._before or super().state()


def _of_one_copy(grid: ProcessGrid) -> tuple[dist.ProcessGroup | None, int]:
    """The group of ranks with the same samples as this one, and its reading rank. Collective.

    No group where a copy of the model is one rank.
    """
    groups = model_groups(grid.tp, grid.pp, grid.dp)
    own = next(ranks for ranks in groups if grid.rank in ranks)
    if len(own) == 1:
        return None, grid.rank
    if len(groups) == 1:
        return grid.control_group, own[0]
    made = [dist.new_group(ranks, backend="gloo", timeout=grid.timeout) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if grid.rank in ranks), own[0]
