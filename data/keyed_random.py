"""Random choices as functions of names and numbers, never of what was drawn before."""

from __future__ import annotations

import threading

import numpy as np

_KEPT = 2  # orders of epochs: a step can straddle two


def shuffled(values: np.ndarray | int, seed: int, number: int) -> np.ndarray:
    """The values, or the int64 numbers below `values`, in an order that (seed, number) decides alone."""
    return np.random.Generator(np.random.PCG64([seed, number])).permutation(values)


def generator(seed: int, first: int, second: int) -> np.random.Generator:
    """Random numbers that are a function of the three alone, by a counter: there is no state to keep.

    The two numbers, below 2**64, stand in the upper half of the counter; the lower half counts what is drawn.
    """
    return np.random.Generator(np.random.Philox(counter=[0, 0, second, first], key=seed % 2**128))


def random_bits(seed: int, numbers: np.ndarray, number: int) -> np.ndarray:
    """(N,) uint64 that look random, a function of seed, each of `numbers` (N,) and number: SplitMix64."""
    step = np.uint64(0x9E3779B97F4A7C15)
    key = mix(np.array([seed % 2**64], dtype=np.uint64) + step)
    return mix((mix((key ^ numbers.astype(np.uint64)) + step) ^ np.uint64(number)) + step)


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: a bijection of uint64 that makes all bits depend on all bits.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, section 4; with Stafford's
    constants.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class EpochOrders:
    """From a position in training order to (epoch, sample), where each epoch is a permutation of all samples.

    Several threads may use it at once. Memory: 8 bytes per sample for each of the two orders that are kept.
    """

    def __init__(self, samples: int):
        self._samples, self._making = samples, threading.Lock()
        # Replaced whole and never changed, so that reading needs no lock.
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def locate(self, position: int, seed: int) -> tuple[int, int]:
        """(epoch, index of the sample)."""
        epoch, within = divmod(position, self._samples)
        order = self._orders.get((seed, epoch))
        return epoch, int((self._make(seed, epoch) if order is None else order)[within])

    def _make(self, seed: int, epoch: int) -> np.ndarray:
        with self._making:
            orders = dict(self._orders)
            if (seed, epoch) not in orders:
                orders = {key: orders[key] for key in list(orders)[1 - _KEPT :]}
                orders[seed, epoch] = shuffled(self._samples, seed, epoch)
                self._orders = orders
            return orders[seed, epoch]
