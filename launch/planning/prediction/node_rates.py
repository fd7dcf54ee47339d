"""Rates of a node in training: products, collectives inside and between nodes, kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launch.planning.prediction.constants import Constants
from launch.planning.prediction.hardware import Node
from modeling import cost

TILE = 128  # rows and columns that one multiprocessor computes at a time
LATENCY, FAR_LATENCY = 2.5e-6, 10e-6  # seconds of a hop of a collective, inside a node and between nodes


@dataclass(frozen=True)
class NodeRates:
    """Rates of a node in training, in operations and bytes per second."""

    node: Node
    constants: Constants
    ranks: int  # of the run

    @property
    def ranks_here(self) -> int:
        """Ranks on a full node."""
        return min(self.ranks, self.node.gpus)

    @property
    def kernel_seconds(self) -> float:
        """Seconds of the host to start a kernel."""
        own = self.node.kernel_seconds
        return self.constants.kernel_us * 1e-6 if own is None else own

    def product_seconds(self, product: cost.Product, precision: str) -> float:
        """Predict a matrix product: computing it or moving its operands, whichever is slower.

        The share of the rate falls with the last wave of tiles that does not fill the GPU, and with short
        sums.
        """
        gpu, width = self.node.gpu, 4 if precision == "fp32" else 2
        if reached := gpu.reached_tflops.get(precision):  # of cores, which have no waves of tiles
            return product.operations / (reached * 1e12)
        rate = gpu.tflops[precision] * 1e12 * gpu.matrix_share * self.constants.matrix
        tiles = math.ceil(product.m / TILE) * math.ceil(product.n / TILE) * product.times
        waves = tiles / gpu.multiprocessors
        filled = waves / math.ceil(waves)
        deep = product.k / (product.k + self.constants.depth)
        moved = (
            width * product.times * (product.m * product.k + product.k * product.n + product.m * product.n)
        )
        return max(product.operations / (rate * filled * deep), moved / (gpu.memory_gb_s * 1e9))

    def collective_seconds(self, size: float, ranks: int, spread: int, *, passes: int = 2) -> float:
        """Predict a ring of `ranks` ranks, `spread` apart in rank order: `passes` x (n - 1) / n x size.

        Two passes are an all-reduce, one is a gather or a scatter (Patarasuk and Yuan 2009). Inside a node
        each rank has its link; between nodes the groups that cross share the node's network.
        """
        if ranks == 1 or not size:
            return 0.0
        hop = LATENCY if self.inside(ranks, spread) else FAR_LATENCY
        latency = passes * min(ranks - 1, 2 * math.ceil(math.log2(ranks))) * hop
        return passes * (ranks - 1) / ranks * size / self.ring_rate(ranks, spread) + latency

    def ring_rate(self, ranks: int, spread: int) -> float:
        """Return the bytes per second of each rank of a ring."""
        inside = self.link(ranks)
        if self.inside(ranks, spread):
            return inside
        members = max(1, self.node.gpus // spread)  # of a group in one node
        groups = self.node.gpus / members  # that cross the node's border
        return min(inside, self.network / groups)

    def inside(self, ranks: int, spread: int) -> bool:
        """Check that no group of `ranks` ranks, `spread` apart, crosses a node's border."""
        return self.node.holds_groups(ranks, spread, self.ranks)

    def link(self, ranks: int) -> float:
        """Return the bytes per second of a GPU to the others of its group in a node.

        Without a switch only the lines that lead to them count.
        """
        link = self.node.form.link
        between = (link.pair_gb_s or math.inf) * (ranks - 1)
        return min(link.gb_s or math.inf, between) * 1e9 * self.constants.link

    @property
    def network(self) -> float:
        """Bytes per second of a node to others; of its PCIe if no network is known."""
        form = self.node.form
        if form.network and form.network.reached_gb_s:
            return form.network.reached_gb_s * 1e9
        return (form.network.gb_s if form.network else form.pcie_gb_s) * 1e9 * self.constants.network

    def hop_seconds(self, size: float, spread: int) -> float:
        """Predict sending `size` bytes to the rank `spread` further; every rank of a node sends at once."""
        if not size:
            return 0.0
        rate = self.link(2)
        if spread >= self.node.gpus:
            rate = min(rate, self.network / self.ranks_here)
        return size / rate + FAR_LATENCY
