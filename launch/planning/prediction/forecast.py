"""The forecast of a step on given nodes: memory, time, verdict, cost of the run, remarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from launch.planning.prediction import rank_memory
from launch.planning.prediction.constants import Constants, fitted, fitted_constants
from launch.planning.prediction.hardware import Node, Price
from launch.planning.prediction.rank_memory import RankMemory
from launch.planning.prediction.step_time import StepTime, step_time
from launch.planning.prediction.workload import Workload
from recipes.layout import BatchSchedule, divisors

Verdict = Literal["fits", "snug", "out of memory"]
Place = Literal["GPU", "host"]
Values = Mapping[str, float | int | str]
LARGE_BUBBLE = 0.10
LEAST_GAIN = 0.01  # of a step's time, from which a larger micro-batch is advised
MOST_MICRO = 8191
# % of the peak rate, every product counted: what no published row of this repository leaves (it has 3 to 52).
LEAST_SHARE = 1.0
MOST_SHARE = 75.0


@dataclass(frozen=True)
class Remark:
    """A warning or advice about a plan.

    Attributes:
        kind: key of its sentence in `forecast_text.REMARKS`.
        values: numbers and names in the sentence.
    """

    kind: str
    values: Values


class Filled(NamedTuple):
    """A memory, and what a step takes of it, in bytes.

    Attributes:
        needed: with all that torch would reserve.
        least: without which a step runs out of memory.
        room: capacity.
    """

    place: Place
    needed: float
    least: float
    room: float

    @property
    def missing(self) -> float:
        """Bytes missing at least; negative: left."""
        return self.least - self.room

    @property
    def share(self) -> float:
        return self.needed / self.room


@dataclass(frozen=True)
class LargestMicroBatch:
    """The largest micro-batches that fit: as planned, with every layer recomputed, with none; 0: none."""

    as_planned: int
    recomputed: int
    kept: int


@dataclass(frozen=True)
class PredictedSpeed:
    """Rates of a step.

    Attributes:
        tflops: per GPU, by the formula of the published tables.
        exact_tflops: per GPU, by a count of every matrix product, recomputed ones too.
        mfu: share of the peak rate, without recomputation (Chowdhery et al. 2022, appendix B).
    """

    samples: float
    tokens: float
    tflops: float
    exact_tflops: float
    mfu: float


@dataclass(frozen=True)
class Bill:
    """Time, energy and price of some steps.

    Attributes:
        small: steps with fewer samples, while the batch is ramped up.
        kwh: at the boards' power limit, with the nodes; None: unknown.
        price: of a GPU's hour; None: unknown.
    """

    steps: int
    small: int
    tokens: int
    seconds: float
    gpu_hours: float
    kwh: float | None
    price: Price | None = None

    @property
    def usd(self) -> float | None:
        return self.gpu_hours * self.price.usd_per_gpu_hour if self.price else None


@dataclass(frozen=True)
class Forecast:
    """The prediction for a workload on as many nodes as its layout needs, computed where it is asked for.

    On a node without GPUs a step is in the host's memory.

    Attributes:
        constants: by default those that were fitted.
        unit: micro x dp has to divide it; None: the global batch.
    """

    work: Workload
    node: Node
    constants: Constants = field(default_factory=fitted_constants)
    unit: int | None = None

    @property
    def nodes(self) -> int:
        return math.ceil(self.work.layout.world / self.ranks_here)

    @property
    def ranks_here(self) -> int:
        """Ranks on a full node: one for each GPU, or all without GPUs."""
        world = self.work.layout.world
        return min(world, self.node.gpus or world)

    @cached_property
    def stages(self) -> list[RankMemory]:
        """Memory of a rank of each pipeline stage."""
        return rank_memory.of_stages(self.work, self.node.gpu, self.constants)

    @cached_property
    def _ends(self) -> list[RankMemory]:
        ends = rank_memory.of_ends(self.work, self.node.gpu, self.constants)
        if self.node.gpus:
            return ends
        return [rank_memory.resident(self.work, rank) for rank in ends]

    @property
    def fullest_rank(self) -> RankMemory:
        """Memory of a rank of the fullest stage."""
        return max(self._ends, key=lambda rank: rank.total)

    @property
    def host(self) -> float:
        """Bytes in a node's host memory."""
        if not self.node.gpus:
            return self.ranks_here * self.fullest_rank.total
        return self.ranks_here * max(rank.host for rank in self._ends)

    @property
    def nvme(self) -> float:
        """Bytes on a node's NVMe."""
        return self.ranks_here * max(rank.nvme for rank in self._ends)

    @property
    def margin(self) -> float:
        """Bytes left on the fullest GPU by all that torch would reserve; negative: missing."""
        return self.node.gpu.memory_bytes - self.fullest_rank.total

    @cached_property
    def memories(self) -> tuple[Filled, ...]:
        """What is taken of the fullest GPU, if there are any, and of a node's host memory."""
        memory = self.node.memory
        host = Filled("host", self.host, self.host, memory.host_bytes)
        if not memory.gpus:
            return (host,)
        rank = self.fullest_rank
        return Filled("GPU", rank.total, rank.least, memory.gpu_bytes), host

    @property
    def binding(self) -> Filled:
        """The memory that runs out, or the fullest one."""
        return max(self.memories, key=lambda each: (each.missing > 0, each.share))

    @cached_property
    def verdict(self) -> Verdict:
        """fits: with all that torch would reserve; snug: once it has given back what no tensor uses."""
        if self.binding.missing > 0:
            return "out of memory"
        snug = any(each.needed > each.room for each in self.memories)
        return "snug" if snug else "fits"

    @cached_property
    def time(self) -> StepTime | None:
        """Time of a step; None if the GPU lacks the precision."""
        if self.work.precision not in self.node.gpu.tflops:
            return None
        return step_time(self.work, self.node, self.constants)

    @property
    def waits(self) -> bool:
        """Check whether a GPU is predicted to wait for the host."""
        return bool(self.time and self.time.waits)

    @property
    def time_kind(self) -> str:
        """Key of the error that the predicted time bears."""
        if self.waits:
            return "waiting"
        return fitted().kind("time", self.work.precision, self.work.software.name)

    @property
    def speed(self) -> PredictedSpeed | None:
        """Rates of a step; None without a time."""
        return speed(self.work, self.node, self.time.total) if self.time else None

    @cached_property
    def largest(self) -> LargestMicroBatch:
        """The largest micro-batch for each kind of recomputation; host memory counts too."""

        def largest(step: Workload) -> int:
            def fits(micro: int) -> bool:
                return replace(self, work=step.with_micro(micro)).verdict == "fits"

            return largest_number(fits, MOST_MICRO)

        work = self.work
        recomputed = replace(work, recomputed=1, selective=False)
        kept = replace(recomputed, recomputed=0)
        return LargestMicroBatch(largest(work), largest(recomputed), largest(kept))

    @cached_property
    def remarks(self) -> list[Remark]:
        """Warnings and advice."""
        work = self.work
        node = self.node
        layout = work.layout
        world = layout.world
        verdict = self.verdict
        rates = node.gpu.tflops
        bubble = small = 0.0
        share = LEAST_SHARE
        if self.time and self.speed:
            bubble = self.time.bubble_share
            small = (self.time.elementwise + self.time.host) / self.time.total
            share = 100 * self.speed.exact_tflops / rates[work.precision]
        plausible = LEAST_SHARE <= share <= MOST_SHARE
        waiting = (layout.pp - 1) / work.interleave * (1 - LARGE_BUBBLE)
        chunks = math.ceil(waiting / LARGE_BUBBLE)
        better = _better_micro(self)
        has = ", ".join(name for name in rates if name != "fp32")
        over = world % node.gpus if world > node.gpus else 0
        host = self.host / 1e9
        room = node.host.memory_gb
        saved = self.ranks_here * work.widths_of(0).saved * work.parameters_of(0)
        copy = (self.host + saved / layout.dp) / 1e9
        # kind, whether it is made, values
        every: tuple[tuple[str, object, Values], ...] = (
            (
                "tensor across nodes",
                not node.holds_groups(layout.tp, 1, world),
                dict(tp=layout.tp, gpus=node.gpus),
            ),
            (
                "network unknown",
                self.nodes > 1 and node.network is None,
                dict(node=node.name, rate=node.pcie_gb_s),
            ),
            (
                "bubble",
                bubble > LARGE_BUBBLE and chunks > layout.accumulation,
                dict(share=bubble, chunks=chunks, now=layout.accumulation),
            ),
            ("snug", verdict == "snug", dict(missing=-self.margin / 1e9)),
            ("larger batch", better, better),
            (
                "recomputation",
                verdict == "fits"
                and work.recomputed
                and self.largest.kept >= layout.micro,
                dict(micro=layout.micro),
            ),
            (
                "no precision",
                work.precision not in rates,
                dict(precision=work.precision, gpu=node.gpu.title, has=has or "fp32"),
            ),
            ("partly filled node", over, dict(ranks=over, gpus=node.gpus)),
            ("host memory", host > room, dict(needed=host, there=room)),
            ("saving waits", host <= room < copy, dict(needed=copy, there=room)),
            (
                "nvme unknown",
                self.nvme and node.nvme_gb_s is None,
                dict(node=node.name),
            ),
            ("kernel starts", small > 0.5, dict(share=small)),
            ("implausible", small <= 0.5 and not plausible, dict(share=share)),
        )
        return [Remark(kind, values) for kind, made, values in every if made]

    def bill(
        self, steps: int, sizes: BatchSchedule, usd_per_gpu_hour: float | None = None
    ) -> Bill | None:
        """Return time, energy and price of `steps` optimizer steps; None without a predicted time.

        `sizes`: of the steps; `usd_per_gpu_hour`: the user's price; None: the catalogue's.
        """
        if self.time is None:
            return None
        layout = self.work.layout
        gpus = layout.world
        seconds = 0.0
        tokens = 0
        stretches = pairwise((*sizes.stretches, (steps, 0, 0)))
        for (before, _, size), (end, _, _) in stretches:
            count = max(0, min(end, steps) - before)
            shares = replace(
                layout,
                accumulation=size // (layout.micro * layout.dp),
                global_batch=size,
            )
            work = replace(self.work, layout=shares)
            seconds += count * step_time(work, self.node, self.constants).total
            tokens += count * work.tokens_per_step
        other = self.node.other_watts
        energy = None
        gpu = self.node.gpu
        if other is not None:
            watts = gpu.watts * gpus + other * self.nodes
            energy = watts * seconds / 3.6e6
        price = gpu.price
        if usd_per_gpu_hour is not None:
            price = Price(usd_per_gpu_hour=usd_per_gpu_hour, where="--usd_per_gpu_hour")
        small = min(steps, sizes.stretches[-1][0])
        return Bill(
            steps, small, tokens, seconds, gpus * seconds / 3600.0, energy, price
        )


def speed(work: Workload, node: Node, seconds: float) -> PredictedSpeed:
    """Return the rates of a step of `seconds`, predicted or measured."""
    gpus = work.layout.world
    return PredictedSpeed(
        samples=work.layout.global_batch / seconds,
        tokens=work.tokens_per_step / seconds,
        tflops=work.published_tflops(seconds, gpus),
        exact_tflops=work.exact_tflops(seconds, gpus),
        mfu=work.exact_tflops(seconds, gpus, recomputation=False)
        / node.gpu.tflops[work.precision],
    )


def largest_number(fits: Callable[[int], bool], most: int) -> int:
    """Return by bisection the largest number from 1 to `most` that fits; 0: none fits."""
    low = 0
    high = 1
    while high <= most and fits(high):
        low = high
        high = 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _better_micro(predicted: Forecast) -> dict[str, float | int]:
    """Return the fastest larger micro-batch that fits and makes the same global batch; {}: none."""
    work = predicted.work
    layout = work.layout
    if predicted.verdict != "fits" or predicted.time is None:
        return {}
    tried = []
    share = layout.micro * layout.accumulation
    unit = predicted.unit or layout.global_batch
    for micro in divisors(math.gcd(share, unit // layout.dp)):
        if layout.micro < micro <= predicted.largest.as_planned:
            other = replace(layout, micro=micro, accumulation=share // micro)
            larger = replace(work, layout=other)
            time = step_time(larger, predicted.node, predicted.constants)
            tried.append((time.total, micro))
    seconds, best = min(tried, default=(math.inf, 0))
    gain = 1 - seconds / predicted.time.total
    if gain < LEAST_GAIN:
        return {}
    return {"micro": best, "accumulation": share // best, "gain": gain}
