"""Process groups of trainings that follow each other in the same processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_groups() -> Iterator[None]:
    """Destroy the process groups of the block at its end, DeepSpeed's too. Collective.

    Each keeps threads that wake a hundred times a second: a few trainings after each other in the same
    processes, and these take more of the machine than the training.
    """
    from deepspeed.utils import groups
    from torch.distributed import destroy_process_group, distributed_c10d

    before, kept = {*distributed_c10d._world.pg_map}, dict(vars(groups))
    try:
        yield
    finally:
        for group in [each for each in distributed_c10d._world.pg_map if each not in before]:
            destroy_process_group(group)
        vars(groups).update(kept)  # those that DeepSpeed keeps for its next engine
