"""Time of an optimizer step: products, element-wise work, communication, offload, update.

A roofline with few constants (`constants.yaml`). Symbols as in `modeling.cost`; p pipeline stages, m
micro-batches of a step, v chunks of layers per stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from launch.planning.prediction.constants import Constants
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.workload import Workload
from modeling import cost
from modeling.cost import products
from recipes.families import Window

WAITING = 0.1  # of a step's time, from which on the host counts as what limits it
# Rows and columns that one multiprocessor computes at a time: less feeds its slower units of fp32.
TILE = 128
TILE_FP32 = 64
# seconds of a hop of a collective, inside a node and between nodes
LATENCY = 2.5e-6
FAR_LATENCY = 10e-6
TENSORS = 12  # parameter tensors of a layer
# Kernels that the host starts, `benchmark.py kernels`: of embedding, heads and loss in both passes; for a
# collective besides its own, which waits for an event and records one (ProcessGroupNCCL.cpp).
END_KERNELS = 20
COLLECTIVE_KERNELS = 3
# Of a step besides its passes, when the GPU has little to do: a step of ours starts 260, of which 4 layers
# and the ends take 156 (docs/benchmarks.md, on the second device).
STEP_KERNELS = 100
# Of Adam on the host per parameter: gradient, master weight and two moments read, the last three written, and
# the weight in half precision.
HOST_UPDATE_BYTES = 30


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step by cause, on the slowest path; their sum is the step.

    Attributes:
        matrix: products of weights, attention and the heads; recomputation included.
        elementwise: all other computation of layers.
        host: the GPU waits for the host to start kernels, and for its work between steps.
        tensor: all-reduces, or gathers and scatters, of tensor parallelism.
        boundary: transfers between pipeline stages.
        bubble: waiting for the pipeline to fill and to empty.
        data: averaging gradients and ZeRO's gathering, without the part hidden by computation.
        offload: transfers to and from the host or NVMe.
    """

    matrix: float
    elementwise: float
    host: float
    tensor: float
    boundary: float
    bubble: float = 0.0
    data: float = 0.0
    offload: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.split.values())

    @property
    def split(self) -> dict[str, float]:
        """Seconds by cause."""
        return dict(vars(self))

    @property
    def waits(self) -> bool:
        """Check whether the GPU waits for the host for `WAITING` of the step or longer."""
        return self.host >= WAITING * self.total

    @property
    def bubble_share(self) -> float:
        """The bubble's share of the pipeline's time (Narayanan et al. 2021, section 2.2)."""
        passes = self.total - self.data - self.offload - self.update
        return self.bubble / (passes or 1.0)


def step_time(work: Workload, node: Node, constants: Constants) -> StepTime:
    """Predict a step of `work` on as many such nodes as it needs."""
    layout = work.layout
    machine = NodeRates(node, constants, layout.world)
    passes = StageTimes(work, machine)
    m = layout.accumulation
    slowest = max({0, layout.pp - 1}, key=lambda stage: passes.of_stage(stage).total)
    own = passes.of_stage(slowest)
    typical = passes.of_stage(1 if layout.pp > 2 else 0)
    computed = m * (own.matrix + own.elementwise + own.host)
    return StepTime(
        matrix=m * own.matrix,
        elementwise=m * own.elementwise,
        host=m * own.host + STEP_KERNELS * machine.kernel_seconds,
        tensor=m * own.tensor,
        boundary=m * own.boundary,
        bubble=(layout.pp - 1) / work.interleave * typical.total,
        data=_data_seconds(work, machine, computed),
        offload=_offload_seconds(work, machine),
        update=_update_seconds(work, machine),
    )


class StageTimes:
    """Seconds of a micro-batch on the stages of a pipeline."""

    def __init__(self, work: Workload, machine: NodeRates):
        self.work = work
        self.machine = machine
        layout = work.layout
        model = work.model
        self.again = 1.0 if work.recomputed else 0.0
        self.collectives = 4 + 2 * self.again  # of tensor parallelism, in a layer
        self._stream_bytes = work.width * work.tokens * model.hidden
        layer = products.layer_products(model, work.tokens, layout.tp)
        self.weights = self._products(layer)
        windows = model.windows
        self.scores = sum(
            windows.count(each) * self._scores(each) for each in {*windows}
        ) / len(windows)
        # Kernels that keep no scores compute them again backward.
        self.scores_backward = 2.0 if work.software.keeps_scores else 2.5
        heads = products.head_products(
            model,
            layout.micro,
            work.sequence_length,
            work.padded_vocab,
            layout.tp,
            work.predicted,
        )
        self.heads = self._products(heads)

    def of_stage(self, stage: int) -> StepTime:
        """Predict forward pass, recomputation and backward pass of a micro-batch.

        The host starts kernels while the GPU works: what it needs beyond that the GPU waits.
        """
        work = self.work
        layers = work.layers_of(stage)
        last = stage == work.layout.pp - 1
        times = 3 + self.again
        of_scores = 1 + max(self.again, work.selective) + self.scores_backward
        matrix = layers * (times * self.weights + of_scores * self.scores)
        between = self._between() * times * layers
        # of the loss, three passes in fp32 over the logits and two in half precision
        if last:
            matrix += 3 * self.heads
            moved = self.machine.constants.traffic * 32 * work.logits
            between += moved / (self.machine.node.gpu.memory_gb_s * 1e9)
        # A layer's all-reduces: two forward, two backward, two recomputed. Sequence parallelism moves as much
        # by gathers and scatters (Korthikanti et al. 2022, section 4.2.2).
        each = self.machine.collective_seconds(self._stream_bytes, work.layout.tp, 1)
        tensor = each * self.collectives * layers
        host = max(0.0, self._started(layers) - matrix - between - tensor)
        return StepTime(matrix, between, host, tensor, self._boundary())

    def _started(self, layers: int) -> float:
        """Predict the host's seconds to start the kernels and collectives of a micro-batch."""
        work = self.work
        kernels = layers * work.software.passes.kernels * (3 + self.again) + END_KERNELS
        if work.layout.tp > 1:
            kernels += layers * COLLECTIVE_KERNELS * self.collectives
        # from one neighbour and to the other, forward and backward
        if work.layout.pp > 1:
            kernels += 4 * COLLECTIVE_KERNELS * work.interleave
        return kernels * self.machine.kernel_seconds

    def _scores(self, window: Window) -> float:
        """Predict a layer's attention; kernels without kept scores skip the masked half."""
        work = self.work
        square = products.attention_products(
            work.model, work.tokens, work.sequence_length, work.layout.tp, window
        )
        whole = work.model.facts.masked or window or work.software.keeps_scores
        return self._products(square) * (1.0 if whole else 0.5)

    def _products(self, products: Iterable[products.Product]) -> float:
        return sum(
            self.machine.product_seconds(product, self.work.precision)
            for product in products
        )

    def _between(self) -> float:
        """Predict a layer's forward pass besides products: bytes over the memory's bandwidth."""
        work = self.work
        cut = work.layout.tp if work.sequence_parallel else 1
        passes = work.software.passes
        each = passes.whole / cut + passes.cut / work.layout.tp
        moved = self._stream_bytes * each
        if work.software.keeps_scores:
            moved += passes.scores * work.activations.scores
        return (
            self.machine.constants.traffic
            * moved
            / (self.machine.node.gpu.memory_gb_s * 1e9)
        )

    def _boundary(self) -> float:
        """Predict handing on activations and gradients, for each of v chunks."""
        work = self.work
        layout = work.layout
        if layout.pp == 1:
            return 0.0
        size: float = self._stream_bytes
        if work.software.cuts_boundaries or work.sequence_parallel:
            size /= layout.tp
        hop = self.machine.hop_seconds(size, layout.tp * layout.dp)
        return 2 * work.interleave * hop


def _data_seconds(work: Workload, machine: NodeRates, computed: float) -> float:
    """Predict the seconds of data-parallel communication that computation does not hide.

    Reductions run under the backward pass where a system overlaps them. Stage 3's gathering counts in full:
    where a share of it that is hidden was fitted too, that came out at 0.01, the least that was allowed.
    """
    layout = work.layout
    stage = work.zero_stage
    parameters = work.parameters_of(0)
    dp = layout.dp
    tp = layout.tp
    m = layout.accumulation
    size = work.width * parameters  # of the weights, and of their gradients
    backward = computed / (2 * m)  # of the last micro-batch
    # gathered forward and backward, and gradients scattered, for every micro-batch
    if stage == 3:
        used = work.width * replace(work, model=work.model.unshared).parameters_of(0)
        gathered = machine.collective_seconds(used, dp, tp, passes=1)
        scattered = machine.collective_seconds(size, dp, tp, passes=1)
        return m * (2 * gathered + scattered)
    reduce_passes = 1 if stage else 2
    reduced = machine.collective_seconds(size, dp, tp, passes=reduce_passes)
    times = m if stage == 2 else 1
    gathered = machine.collective_seconds(size, dp, tp, passes=1) if stage else 0.0
    hidden = 0.0
    if work.overlaps_gradients or work.software.overlaps_gradients:
        hidden = min(times * reduced, times * backward)
    if work.software.overlaps_weights:
        hidden += min(gathered, backward)
    return max(0.0, times * reduced + gathered - hidden)


def _offload_seconds(work: Workload, machine: NodeRates) -> float:
    """Predict the seconds of PCIe and NVMe transfers; DeepSpeed hides few of them."""
    layout = work.layout
    node = machine.node
    pcie = node.pcie_gb_s * 1e9
    m = layout.accumulation
    share = work.parameters_of(0) / layout.dp
    seconds = 0.0
    if work.optimizer_at != "gpu":
        # Gradients out, weights back. ZeRO-2 adds up on the GPU: it fetches what it has for each micro-batch.
        times = {2: 2 * m - 1, 3: m}.get(work.zero_stage, 1)
        seconds += work.width * share * (times + 1) / pcie
    if work.weights_at != "gpu":
        seconds += 2 * m * work.width * share / pcie
    if work.checkpoints_at == "host":
        kept = work.activations.stream * work.layers_of(0) / max(1, work.recomputed)
        seconds += 2 * m * kept / (layout.tp if work.cuts_checkpoints else 1) / pcie
    if node.nvme_gb_s and "nvme" in (work.optimizer_at, work.weights_at):
        # 16 read and 16 written
        states = 32 * share if work.optimizer_at == "nvme" else 0.0
        states += 2 * m * work.width * share if work.weights_at == "nvme" else 0.0
        seconds += states * machine.ranks_here / (node.nvme_gb_s * 1e9)
    return seconds


def _update_seconds(work: Workload, machine: NodeRates) -> float:
    """Predict the seconds of Adam over a rank's share, at the rate of the GPU's or host's memory."""
    layout = work.layout
    node = machine.node
    parameters = max(work.parameters_of(stage) for stage in {0, layout.pp - 1})
    sharing = layout.dp if work.zero_stage else 1
    share = parameters / sharing
    if work.optimizer_at == "gpu":
        tensors = TENSORS * work.model.different_layers(work.layers_of(0)) / sharing
        started = work.software.update_kernels * tensors * machine.kernel_seconds
        moved = work.software.update_bytes * share / (node.gpu.memory_gb_s * 1e9)
        muon = _muon_seconds(work, machine) if work.muon else 0.0
        return max(moved, started) + muon
    return (
        HOST_UPDATE_BYTES * share * machine.ranks_here / (node.host.memory_gb_s * 1e9)
    )


def _muon_seconds(work: Workload, machine: NodeRates) -> float:
    """Predict Muon's products, and the exchange of what they take and make.

    The ranks of a stage share them by whole matrices. A rank's pieces go to the matrices' owners and come
    back; under ZeRO-0 it has them already, and only gets the updates.
    """
    model = work.model
    layout = work.layout
    layers = work.layers_of(0)
    square = products.Product(model.hidden, model.hidden, model.hidden)
    each = products.OF_MUON * model.different_layers(layers) / (layout.dp * layout.tp)
    count = max(each, products.OF_LARGEST_MATRIX)
    held = work.width * cost.hidden_matrices(model, layers, layout.tp)
    share = held / layout.dp
    if work.zero_stage:
        data = machine.collective_seconds(share, layout.dp, layout.tp)
    else:
        data = machine.collective_seconds(held, layout.dp, layout.tp, passes=1)
    tensor = machine.collective_seconds(share, layout.tp, 1)
    return count * machine.product_seconds(square, work.precision) + data + tensor


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
        return self.constants.kernel_us * 1e-6

    def product_seconds(self, product: products.Product, precision: str) -> float:
        """Predict a matrix product: computing it or moving its operands, whichever is slower.

        The share of the rate falls with the last wave of tiles that does not fill the GPU, and with short
        sums.
        """
        gpu = self.node.gpu
        width = 2
        tile = TILE
        share = gpu.matrix_share
        if precision == "fp32":
            width = 4
            tile = TILE_FP32
            share = gpu.matrix_share_fp32
        peak = gpu.tflops[precision]
        rate = peak * 1e12 * share * self.constants.matrix
        tiles = (
            math.ceil(product.m / tile) * math.ceil(product.n / tile) * product.times
        )
        waves = tiles / gpu.multiprocessors
        filled = waves / math.ceil(waves)
        # Filling takes as long at any rate of the units: fewer steps of slow ones.
        depth = self.constants.depth * peak / max(gpu.tflops.values())
        deep = product.k / (product.k + depth)
        moved = (
            width
            * product.times
            * (product.m * product.k + product.k * product.n + product.m * product.n)
        )
        return max(
            product.operations / (rate * filled * deep), moved / (gpu.memory_gb_s * 1e9)
        )

    def collective_seconds(
        self, size: float, ranks: int, spread: int, *, passes: int = 2
    ) -> float:
        """Predict a ring of `ranks` ranks, `spread` apart in rank order: `passes` x (n - 1) / n x size.

        Two passes are an all-reduce, one is a gather or a scatter (Patarasuk and Yuan 2009). Inside a node
        each rank has its link; between nodes the groups that cross share the node's network.
        """
        if ranks == 1 or not size:
            return 0.0
        hop = LATENCY if self.inside(ranks, spread) else FAR_LATENCY
        latency = passes * min(ranks - 1, 2 * math.ceil(math.log2(ranks))) * hop
        return (
            passes * (ranks - 1) / ranks * size / self.ring_rate(ranks, spread)
            + latency
        )

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
        link = self.node.link
        between = (link.pair_gb_s or math.inf) * (ranks - 1)
        return min(link.gb_s or math.inf, between) * 1e9 * self.constants.link

    @property
    def network(self) -> float:
        """Bytes per second of a node to others; of its PCIe if no network is known."""
        network = self.node.network
        if network and network.reached_gb_s:
            return network.reached_gb_s * 1e9
        return (
            (network.gb_s if network else self.node.pcie_gb_s)
            * 1e9
            * self.constants.network
        )

    def hop_seconds(self, size: float, spread: int) -> float:
        """Predict sending `size` bytes to the rank `spread` further; every rank of a node sends at once."""
        if not size:
            return 0.0
        rate = self.link(2)
        if spread >= self.node.gpus:
            rate = min(rate, self.network / self.ranks_here)
        return size / rate + FAR_LATENCY
