"""From a position in training order to (epoch, sample), for samples that can be read in any order."""

from __future__ import annotations

import threading

import numpy as np

from data.keyed_random import epoch_order

_KEPT = 2  # orders: a step can straddle two epochs


class EpochOrders:
    """Every epoch is a permutation of all samples, which (seed, epoch) decides alone. Used by several threads at once.

    Memory: 8 bytes per sample for each of the two orders that are kept.
    """

    def __init__(self, samples: int):
        self._samples = samples
        self._orders: dict[
            tuple[int, int], np.ndarray
        ] = {}  # replaced whole and never changed, so that reading needs no lock
        self._making = threading.Lock()

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
                orders[seed, epoch] = epoch_order(self._samples, seed, epoch)
                self._orders = orders
            return orders[seed, epoch]
