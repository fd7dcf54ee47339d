"""Sums of squares, exact to rounding for any number of elements."""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.utils import get_norm_dtype

BLOCK = 512  # elements whose squares float32 adds up without loss


def squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64, but for blocks of 512: a CPU adds up several times as fast in float32."""
    flat = gradient.flatten()
    blocks = flat.numel() // BLOCK
    parts = flat[: blocks * BLOCK].view(blocks, BLOCK), flat[blocks * BLOCK :].view(1, -1)
    norms = torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts])
    return torch.linalg.vector_norm(norms, dtype=get_norm_dtype()).square()
