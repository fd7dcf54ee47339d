"""Dropout on the residual stream, the same under every layout.

An element's fate depends only on (seed, step, sample's number in the global batch, position, name of the
dropout, feature): not on the rank, the stage, the micro-batch, the padding, or earlier draws. So a
recomputation or a resumed run restores nothing.

Every element's word is made of two factors; a mask costs one multiplication, one addition and one comparison:

    dropout_seeds (B, S, 2): a and b of every position of every sample, made anew for every step;
            they ride along with the stream (`modeling/layer_list.py`)
    columns (H,): c of every feature of this dropout, fixed by its name

    dropped where (a c + b) mod 2^32 < p 2^32

With a and b uniform, two elements of one position, in one dropout or in two, are dropped independently of
each other (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic
without primes", 1996; exactly to 2^(z-32), where their c's have the z lowest bits in common). Vector units
multiply words of 32 bits; with 64 bits a CPU took 20 to 50 times as long. Elements of other positions,
samples and steps have seeds of their own. torch's generators are not used: their numbers depend on the
shape of the tensor, and on a GPU on its size.

Shapes: B samples, S positions, H hidden size.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from modeling import fusing
from modeling.initialization import Init

# of SplitMix64, whose finalizer `mixed` is, with Stafford's constants
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def dropout_seeds_of(seed: int, step: int, samples: Tensor, positions: int) -> Tensor:
    """Return the seeds (..., S, 2) int64 of optimizer step `step`, on the device of `samples`.

    samples (...): numbers in the global batch.
    """
    digest = hashlib.sha256(f"{seed}:{step}:hidden dropout".encode()).digest()
    count = 2 * torch.arange(positions, device=samples.device)[:, None]
    # below 2^32, for each of as many samples
    count = count + torch.arange(2, device=samples.device)
    return mixed(
        (samples[..., None, None] << 32) + count, int.from_bytes(digest[:8], "little")
    )


def mixed(counters: Tensor, start: int) -> Tensor:
    """Return SplitMix64's output after each of `counters` steps from `start`, as int64."""
    x = counters * _as_int64(_STEP) + _as_int64(start)
    x = (x ^ _shift_right(x, 30)) * _as_int64(_FIRST)
    x = (x ^ _shift_right(x, 27)) * _as_int64(_SECOND)
    return x ^ _shift_right(x, 31)


def _as_int64(word: int) -> int:
    """Return the int64 of the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift to the right and fill with zeros; torch fills a signed number with its sign."""
    x = (x >> by) & (2 ** (64 - by) - 1)
    return x


class HiddenDropout(nn.Module):
    """Dropout of x (B, S, H) in training; nothing in evaluation."""

    columns: Tensor

    def __init__(self, hidden: int, probability: float, *, init: Init):
        super().__init__()
        self.probability = probability
        if probability:
            # A buffer, so that torch.compile makes one graph for all layers.
            words = init.words("columns", hidden).to(torch.int32)  # the low halves
            self.register_buffer("columns", words, persistent=False)

    def forward(self, x: Tensor, dropout_seeds: Tensor | None) -> Tensor:
        """Drop elements of x by dropout_seeds (B, S, 2); training with a probability above 0 needs them."""
        if not (self.training and self.probability):
            return x
        assert dropout_seeds is not None, (
            "hidden dropout in training needs the seeds of the micro-batch"
        )
        drop = _Dropped.apply if fusing.fuses(x) else dropped
        return drop(x, dropout_seeds, self.columns, self.probability)


def dropped(
    x: Tensor, dropout_seeds: Tensor, columns: Tensor, probability: float
) -> Tensor:
    """Return x (B, S, H) without the share `probability` of its elements, the others scaled."""
    factors = dropout_seeds.to(torch.int32)
    kept = (
        factors[..., 1:] + factors[..., :1] * columns
        >= round(probability * 2**32) - 2**31
    )
    return torch.where(kept, x * (1 / (1 - probability)), 0)


class _Dropped(torch.autograd.Function):
    """Dropout as one kernel in each pass; the backward pass computes the mask again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropout_seeds: Tensor, columns: Tensor, probability: float
    ) -> Tensor:
        ctx.save_for_backward(dropout_seeds, columns)
        ctx.probability = probability
        x = fusing.fused(dropped, x, dropout_seeds, columns, probability)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (
            fusing.fused(dropped, gradient, *ctx.saved_tensors, ctx.probability),
            None,
            None,
            None,
        )
