"""Process groups of trainings that follow each other in the same processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

_numbers = itertools.count()  # of the blocks


@contextlib.contextmanager
def temporary_groups() -> Iterator[None]:
    """Destroy the process groups of the block at its end, DeepSpeed's too. Collective.

    Each keeps threads that wake a hundred times a second: a few trainings after each other in the same
    processes, and these take more of the machine than the training.

    Ranks that make a group alone meet under a name that torch makes of their numbers. In another block they
    need another one: by the same they would find connections that are gone, and wait for them forever.
    """
    from deepspeed.utils import groups
    from torch.distributed import barrier, destroy_process_group, distributed_c10d

    before = {*distributed_c10d._world.pg_map}
    kept = dict(vars(groups))
    name = distributed_c10d._hash_ranks_to_str
    block = next(_numbers)
    distributed_c10d._hash_ranks_to_str = lambda ranks: name([*ranks, block])
    try:
        yield
        barrier()  # else a group is destroyed while another rank still receives from it
    finally:
        distributed_c10d._hash_ranks_to_str = name
        for group in [
            each for each in distributed_c10d._world.pg_map if each not in before
        ]:
            destroy_process_group(group)
        vars(groups).update(kept)  # those that DeepSpeed keeps for its next engine
