"""How the next token is drawn from logits: temperature, top-k, top-p, and one uniform number per token."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Draws from the distribution that `transformers`' processors of the same names leave.

    Attributes:
        temperature: logits are divided by it; above 0.
        top_k: tokens that can be drawn, the most likely; None: all.
        top_p: the least likely go as long as what is left sums up to it (Holtzman et al., arXiv 1904.09751).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def filtered(self, logits: Tensor) -> Tensor:
        """(B, V) -> the same divided by the temperature, in float32, -inf for tokens that are not drawn."""
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            removed = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            removed[..., -1] = False  # the most likely always stays
            scores = scores.masked_fill(removed.scatter(-1, order, removed), -torch.inf)
        return scores

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """logits (B, V), uniform (B,) float64 in [0, 1) -> tokens (B,): where summed probabilities pass it.

        By the number and not by a generator of the device, so that a CPU and a GPU draw alike.
        """
        sums = self.filtered(logits).softmax(-1).double().cumsum(-1)
        return torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]


def uniform_numbers(seed: int, prompt: Sequence[int], sample: int) -> np.random.Generator:
    """What one sample's tokens are drawn by: a function of seed, prompt and the sample's number alone.

    So a text does not depend on the batch or the file that its prompt stands in.
    """
    digest = hashlib.sha256(f"{seed}:{sample}:{list(prompt)}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
