"""Random choices as functions of names and numbers, never of what was drawn before."""

from __future__ import annotations

import numpy as np


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    """(samples,) int64: the order of an epoch, a permutation that (seed, epoch) decides alone."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(samples)
