"""The grid of processes: tensor x data x pipeline, in the rank order of `recipes/rank_order.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from recipes.rank_order import coordinates, data_groups, pipeline_groups, tensor_groups

Group = dist.ProcessGroup | None  # of an axis of the grid; None: one rank


class _Groups:
    """Process groups by their ranks, each made once; the world's group exists already.

    Every group is a communicator, which takes memory, and on a large cluster seconds. All ranks make all
    groups of an axis in the same order, as NCCL and gloo demand. (On CUDA `dist.split_group` could make an
    axis in one call; this is untested.)
    """

    def __init__(self, timeout: timedelta | None):
        self.timeout = timeout
        self.made: dict[tuple[int, ...], Any] = {tuple(range(dist.get_world_size())): dist.group.WORLD}

    def of(self, ranks: Iterable[int]) -> Any:
        """Return the group of these ranks, or torch's stand-in if this rank is not among them."""
        ranks = tuple(ranks)
        if ranks not in self.made:
            self.made[ranks] = dist.new_group(list(ranks), timeout=self.timeout)
        return self.made[ranks]

    def own(self, groups: list[list[int]], rank: int) -> dist.ProcessGroup:
        """Make every group of the list; return this rank's."""
        made = [(ranks, self.of(ranks)) for ranks in groups]
        return next(group for ranks, group in made if rank in ranks)


def _getter(path: str) -> Callable[[ProcessGrid], Any]:
    """Return a method that reads the attribute at `path`."""
    return lambda grid: attrgetter(path)(grid)


class ProcessGrid:
    """Process groups of one layout: DeepSpeed's `mpu` object.

    It lacks `initialize_sequence_parallel`, at whose sight DeepSpeed switches the tensor-parallel norm off.
    """

    def __init__(self, tp: int, pp: int, dp: int, timeout: timedelta | None = None):
        """Make the groups. `timeout` of their collectives; None: torch's, 10 minutes for NCCL. Collective."""
        world = dist.get_world_size()
        assert tp * pp * dp == world, f"tp={tp} x pp={pp} x dp={dp} is not the world size {world}"
        self.tp, self.pp, self.dp, self.timeout = tp, pp, dp, timeout
        self.rank = dist.get_rank()
        self.at = coordinates(self.rank, tp, dp)
        self._groups = _Groups(timeout)
        own = partial(self._groups.own, rank=self.rank)
        self.tensor_group: Group = own(tensor_groups(tp, pp, dp)) if tp > 1 else None
        self.pipeline_group: Group = own(pipeline_groups(tp, pp, dp)) if pp > 1 else None
        # Made for one rank, too: DeepSpeed takes the world in place of None.
        self.data_group = own(data_groups(tp, pp, dp))
        # Small messages between hosts' CPUs (stop requests, barriers), on no accelerator's stream.
        self.control_group = dist.new_group(backend="gloo", timeout=timeout)

    @contextlib.contextmanager
    def lend_groups(self) -> Iterator[None]:
        """Lend these groups to DeepSpeed's pipeline grid, built within this context.

        It would make each again, and at tp = 1 an unused one for every rank.
        """
        import deepspeed.comm

        make, made = deepspeed.comm.new_group, self._groups.made
        deepspeed.comm.new_group = lambda ranks: (
            made.get(tuple(ranks)) if len(ranks) == 1 else self._groups.of(ranks)
        )
        try:
            yield
        finally:
            deepspeed.comm.new_group = make

    # DeepSpeed's interface of an `mpu`.
    get_model_parallel_rank = get_tensor_model_parallel_rank = _getter("at.tp")
    get_model_parallel_world_size = get_tensor_model_parallel_world_size = _getter("tp")
    get_model_parallel_group = get_tensor_model_parallel_group = _getter("tensor_group")
    get_pipeline_model_parallel_rank = _getter("at.pp")
    get_pipeline_model_parallel_world_size = _getter("pp")
    get_data_parallel_rank = _getter("at.dp")
    get_data_parallel_world_size = _getter("dp")
    get_data_parallel_group = _getter("data_group")
