"""Random state of attention dropout, a function of only (seed, step, rank's place).

The attention kernel draws from a stream of the device, so its dropout follows the layout; dropout of the
residual stream does not (`modeling/hidden_dropout.py`). There are two streams, as in Megatron-LM (arXiv
1909.08053, appendix B.2). Tensor ranks hold different heads: each draws from its own stream in DeepSpeed's
RNG tracker. A process with all heads draws from the accelerator's default stream, and so does all dropout of
`transformers`' modules. DeepSpeed's activation checkpointing saves and restores both.

Reseeding at every step makes resuming exact without storing any state, which matters because DeepSpeed's
checkpoints do not hold the tracker.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import (
    get_cuda_rng_tracker,
)

from recipes.layout import Coordinates

# the name that DeepSpeed's tracker forks by default
TENSOR_PARALLEL_STREAM = "model-parallel-rng"


def _seed(*parts: object) -> int:
    return int.from_bytes(
        hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:7], "little"
    )


def seed_step(seed: int, step: int, at: Coordinates) -> None:
    """Set both streams for optimizer step `step` on the rank at `at`."""
    get_accelerator().manual_seed(_seed(seed, step, "outside", at.pp, at.dp))
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(
        TENSOR_PARALLEL_STREAM, _seed(seed, step, "inside", at.pp, at.dp, at.tp)
    )


def tensor_parallel_random(active: bool) -> contextlib.AbstractContextManager[Any]:
    """Draw from this tensor rank's own stream within; without `active`, from the default stream."""
    return (
        get_cuda_rng_tracker().fork(TENSOR_PARALLEL_STREAM)
        if active
        else contextlib.nullcontext()
    )
