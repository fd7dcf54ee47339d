"""Random choices as functions of seeds and numbers, independent of earlier draws."""

from __future__ import annotations

import numpy as np


def generator(seed: int, first: int, second: int) -> np.random.Generator:
    """Return a counter-based generator, a function of only the three numbers.

    `first` and `second`, below 2**64, fill the upper half of the counter; the lower half counts the draws.
    """
    return np.random.Generator(
        np.random.Philox(counter=[0, 0, second, first], key=seed % 2**128)
    )


def random_bits(seed: int, numbers: np.ndarray, number: int) -> np.ndarray:
    """Return (N,) uint64 random bits, by SplitMix64 of the seed, each of `numbers` (N,), and `number`."""
    step = np.uint64(0x9E3779B97F4A7C15)
    key = mix(np.array([seed % 2**64], np.uint64) + step)
    return mix(
        (mix((key ^ numbers.astype(np.uint64)) + step) ^ np.uint64(number)) + step
    )


def mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of each uint64 by the finalizer of SplitMix64, a bijection.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, section 4; with Stafford's
    constants.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
