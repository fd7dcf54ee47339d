"""The grid of processes: tensor x data x pipeline, in the rank order of `recipes/rank_order.py`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from recipes.rank_order import coordinates, data_groups, pipeline_groups, tensor_groups

Group = dist.ProcessGroup | None  # of tensor parallelism; None: one rank


def _own_group(groups: list[list[int]], rank: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """Create every group of the list, in the same order on every rank as NCCL and gloo demand; one's own."""
    made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in groups]
    return next(group for ranks, group in made if rank in ranks)


def _getter(path: str) -> Callable[[ProcessGrid], Any]:
    """A method that returns the attribute at `path`."""
    return lambda grid: attrgetter(path)(grid)


class ProcessGrid:
    """Process groups of one layout, DeepSpeed's `mpu` object.

    It lacks `initialize_sequence_parallel`: with it, DeepSpeed switches the tensor-parallel norm off.
    """

    def __init__(self, tp: int, pp: int, dp: int, timeout: timedelta | None = None):
        """Make the groups. `timeout`: of their collectives; None: torch's, 10 minutes of NCCL. Collective."""
        world = dist.get_world_size()
        assert tp * pp * dp == world, f"tp={tp} x pp={pp} x dp={dp} is not the world size {world}"
        self.tp, self.pp, self.dp = tp, pp, dp
        self.rank = dist.get_rank()
        self.at = coordinates(self.rank, tp, dp)
        self.tensor_group = _own_group(tensor_groups(tp, pp, dp), self.rank, timeout)
        self.data_group = _own_group(data_groups(tp, pp, dp), self.rank, timeout)
        self.pipeline_group = _own_group(pipeline_groups(tp, pp, dp), self.rank, timeout)
        # Small messages between hosts' CPUs (stop requests, barriers), on no accelerator's stream.
        self.control_group = dist.new_group(backend="gloo", timeout=timeout)

    # What DeepSpeed calls on an `mpu`.
    get_model_parallel_rank = get_tensor_model_parallel_rank = _getter("at.tp")
    get_model_parallel_world_size = get_tensor_model_parallel_world_size = _getter("tp")
    get_model_parallel_group = get_tensor_model_parallel_group = _getter("tensor_group")
    get_pipeline_model_parallel_rank = _getter("at.pp")
    get_pipeline_model_parallel_world_size = _getter("pp")
    get_data_parallel_rank = _getter("at.dp")
    get_data_parallel_world_size = _getter("dp")
    get_data_parallel_group = _getter("data_group")
