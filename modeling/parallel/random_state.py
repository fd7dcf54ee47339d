"""Random state of dropout, as a function of (seed, step, rank's place) alone.

Two streams, as in Megatron-LM (arXiv 1909.08053, appendix B.2): outside tensor-parallel regions the ranks of
a tensor group must draw the same mask, inside (attention probabilities) each must draw its own. The default
stream of the accelerator is the first, DeepSpeed's RNG tracker holds the second, since its activation
checkpointing saves and restores both.

Reseeding at every step makes resuming exact without storing any state, which matters because DeepSpeed's
checkpoints do not hold the tracker.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

from modeling.parallel.process_grid import Coordinates

TENSOR_PARALLEL_STREAM = "model-parallel-rng"  # the name that DeepSpeed's tracker forks by default


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(":".join(map(str, parts)).encode()).digest()[:7], "little")


def seed_step(seed: int, step: int, at: Coordinates) -> None:
    """Set both streams for optimizer step `step` on the rank at `at`."""
    get_accelerator().manual_seed(_seed(seed, step, "outside", at.pp, at.dp))
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(TENSOR_PARALLEL_STREAM, _seed(seed, step, "inside", at.pp, at.dp, at.tp))


def tensor_parallel_random(active: bool) -> contextlib.AbstractContextManager[Any]:
    """Draw from this tensor rank's own stream; not `active` where nothing is drawn, or by one tensor rank."""
    return get_cuda_rng_tracker().fork(TENSOR_PARALLEL_STREAM) if active else contextlib.nullcontext()


def dropout(x: torch.Tensor, probability: float, training: bool) -> torch.Tensor:
    """Dropout outside tensor-parallel regions: the same mask on every rank of a tensor group."""
    return torch.nn.functional.dropout(x, probability, training) if probability else x
