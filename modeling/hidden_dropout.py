"""Dropout on the residual stream, which no layout changes.

Whether an element is dropped is a function of (seed, step, sample's number in the global batch, position,
name of the dropout, feature) and of nothing else: not of the rank, the stage, the micro-batch, the padding it
is cut to, or what was drawn before. So nothing has to be restored for a recomputation or a resumed run.

Two factors meet in every element, so that a mask costs one multiplication, one addition and one comparison:

    salts   (B, S, 2): a and b of every position of every sample, made anew for every step; they ride along
            with the stream (`modeling/layer_list.py`)
    columns (H,): c of every feature of this dropout, fixed by its name

    dropped where (a c + b) mod 2^32 < p 2^32

With a and b uniform, two elements of one position, in one dropout or in two, are dropped independently of
each other (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic
without primes", 1996; exactly to 2^(z-32), where their c's have the z lowest bits in common). Words of 32
bits are what units of vectors multiply; of 64 bits, a CPU took 20 to 50 times as long. Elements of
other positions, samples and steps have salts of their own. torch's generators are not used, since what they
draw depends on the shape that is asked for, and on a GPU on its size.

Shapes: B samples, S positions, H hidden size.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from modeling.initialization import Init

_STEP = 0x9E3779B97F4A7C15  # of SplitMix64, whose finalizer `mixed` is, with Stafford's constants
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def salts_of(seed: int, step: int, samples: Tensor, positions: int) -> Tensor:
    """Salts (..., S, 2) int64 of optimizer step `step`, on the device of `samples`.

    samples (...): numbers in the global batch.
    """
    digest = hashlib.sha256(f"{seed}:{step}:hidden dropout".encode()).digest()
    count = 2 * torch.arange(positions, device=samples.device)[:, None]
    count = count + torch.arange(2, device=samples.device)  # below 2^32, for each of as many samples
    return mixed((samples[..., None, None] << 32) + count, int.from_bytes(digest[:8], "little"))


def mixed(counters: Tensor, start: int) -> Tensor:
    """SplitMix64's output after each of `counters` steps from `start`, as int64."""
    x = counters * _signed(_STEP) + _signed(start)
    x = (x ^ _shifted(x, 30)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 27)) * _signed(_SECOND)
    return x ^ _shifted(x, 31)


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - 2**64 if word >= 2**63 else word


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, with zeros, which torch's shift of a signed number is not."""
    return (x >> by) & (2 ** (64 - by) - 1)


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

    def forward(self, x: Tensor, salts: Tensor | None) -> Tensor:
        """salts (B, S, 2), which training with a probability above 0 cannot do without."""
        if not (self.training and self.probability):
            return x
        assert salts is not None, "hidden dropout in training needs the salts of the micro-batch"
        factors = salts.to(torch.int32)
        kept = factors[..., 1:] + factors[..., :1] * self.columns >= self._limit
        return torch.where(kept, x * (1 / (1 - self.probability)), 0)

    @property
    def _limit(self) -> int:
        """Signed words below it are dropped: `probability` of all."""
        return round(self.probability * 2**32) - 2**31
