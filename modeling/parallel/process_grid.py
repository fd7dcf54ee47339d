"""The grid of processes: tensor x data x pipeline.

Rank order is DeepSpeed's PipeModelDataParallelTopology: tensor fastest, pipeline slowest. With tp=2, dp=2,
pp=2:

                 stage 0                stage 1
              tp 0    tp 1           tp 0    tp 1
    dp 0   rank 0   rank 1        rank 4   rank 5
    dp 1   rank 2   rank 3        rank 6   rank 7

    tensor groups    [0 1] [2 3] [4 5] [6 7]    share every layer
    data groups      [0 2] [1 3] [4 6] [5 7]    hold the same slice, see other samples
    pipeline groups  [0 4] [1 5] [2 6] [3 7]    hold consecutive layers
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any, NamedTuple

import torch.distributed as dist

Group = dist.ProcessGroup | None  # of tensor parallelism; None: one rank


class Coordinates(NamedTuple):
    """Place of one rank in the grid."""

    tp: int
    dp: int
    pp: int


def coordinates(rank: int, tp: int, dp: int) -> Coordinates:
    """Place of global `rank` in a grid of tensor degree `tp` and data degree `dp`."""
    return Coordinates(tp=rank % tp, dp=rank // tp % dp, pp=rank // (tp * dp))


def tensor_groups(tp: int, pp: int, dp: int) -> list[list[int]]:
    return [list(range(start, start + tp)) for start in range(0, tp * pp * dp, tp)]


def data_groups(tp: int, pp: int, dp: int) -> list[list[int]]:
    stage = tp * dp
    return [[s * stage + d * tp + t for d in range(dp)] for s in range(pp) for t in range(tp)]


def pipeline_groups(tp: int, pp: int, dp: int) -> list[list[int]]:
    stage = tp * dp
    return [[s * stage + i for s in range(pp)] for i in range(stage)]


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
