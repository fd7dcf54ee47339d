"""The grid of processes: tensor x data x pipeline, in the rank order of `recipes/layout.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from recipes.layout import (
    coordinates,
    data_groups,
    model_groups,
    pipeline_groups,
    tensor_groups,
)

Group = dist.ProcessGroup | None  # of an axis of the grid; None: one rank


class _Groups:
    """This rank's process groups by their ranks, each made once; the world's group exists already.

    Every group is a communicator, which takes memory, and on a large cluster seconds. So a rank makes its own
    groups only, one of an axis whatever the world's size. All ranks make those of the axes in the same order.
    """

    def __init__(self, timeout: timedelta | None):
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.world: Any = dist.group.WORLD
        self.made: dict[tuple[int, ...], Any] = {
            tuple(range(dist.get_world_size())): self.world
        }

    def own(self, groups: Sequence[list[int]]) -> Group:
        """Make this rank's one of disjoint groups; None if it is in none of them. Collective."""
        own = tuple(next((ranks for ranks in groups if self.rank in ranks), ()))
        if own not in self.made:
            # NCCL splits the world's communicator
            if self.world.bound_device_id is not None:
                self.made[own] = dist.split_group(
                    split_ranks=[*groups], timeout=self.timeout
                )
            elif own:
                self.made[own] = dist.new_group(
                    [*own], self.timeout, use_local_synchronization=True
                )
        return self.made.get(own)

    def lent(self, ranks: Iterable[int]) -> Any:
        """Return the made group of these ranks, or torch's stand-in if this rank is not among them."""
        ranks = tuple(ranks)
        return (
            self.made[ranks]
            if self.rank in ranks
            else dist.GroupMember.NON_GROUP_MEMBER
        )


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
        assert tp * pp * dp == world, (
            f"tp={tp} x pp={pp} x dp={dp} is not the world size {world}"
        )
        self.tp = tp
        self.pp = pp
        self.dp = dp
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.at = coordinates(self.rank, tp, dp)
        self._groups = _Groups(timeout)
        own = self._groups.own
        self.tensor_group: Group = own(tensor_groups(tp, pp, dp)) if tp > 1 else None
        self.pipeline_group: Group = (
            own(pipeline_groups(tp, pp, dp)) if pp > 1 else None
        )
        # Made for a single rank, too: DeepSpeed takes the world in place of None.
        self.data_group: Group = own(data_groups(tp, pp, dp))
        # Small messages between hosts' CPUs (stop requests, barriers), on no accelerator's stream.
        self.control_group = dist.new_group(backend="gloo", timeout=timeout)

    @contextlib.contextmanager
    def lend_groups(self) -> Iterator[None]:
        """Lend these groups to DeepSpeed's pipeline grid, built within this context. Collective.

        It would make each again, without their timeout, and at tp = 1 an unused one for every rank. Two kinds
        are its own: the ranks of one copy of the model, and the ends of a pipeline, which tie an embedding.
        """
        import deepspeed.comm

        self._groups.own(model_groups(self.tp, self.pp, self.dp))
        if self.pp > 1:
            pipelines = pipeline_groups(self.tp, self.pp, self.dp)
            self._groups.own([[ranks[0], ranks[-1]] for ranks in pipelines])
        if self.tp == 1:
            # of DeepSpeed's tensor axis, never used
            self._groups.made.setdefault((self.rank,), None)
        make = deepspeed.comm.new_group
        deepspeed.comm.new_group = self._groups.lent
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
