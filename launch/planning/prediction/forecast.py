"""The forecast of a step on given nodes: memory, time, verdict, cost of the run, remarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from launch.planning.prediction import rank_memory
from launch.planning.prediction.constants import (
    Constants,
    Median,
    fitted,
    fitted_constants,
)
from launch.planning.prediction.hardware import Node, Price
from launch.planning.prediction.rank_memory import RankMemory
from launch.planning.prediction.step_time import StepTime, step_time
from launch.planning.prediction.workload import Workload
from recipes.layout import BatchSchedule, divisors

Verdict = Literal["fits", "snug", "out of memory"]
Place = Literal["GPU", "host"]
LARGE_BUBBLE = 0.10
LEAST_GAIN = 0.01  # of a step's time, from which a larger micro-batch is advised
MOST_MICRO = 8191
# % of the peak rate, every product counted: what no published row of this repository leaves (it has 3 to 52).
LEAST_SHARE = 1.0
MOST_SHARE = 75.0
HOURS = 3600.0  # seconds


@dataclass(frozen=True)
class Remark:
    """A warning or advice about a plan.

    Attributes:
        kind: key of its sentence in `forecast_text.REMARKS`.
        values: numbers and names in the sentence.
    """

    kind: str
    values: Mapping[str, float | int | str]


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
        unit: micro x dp has to divide it.
    """

    work: Workload
    node: Node
    constants: Constants
    unit: int

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
        if any(each.missing > 0 for each in self.memories):
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
    def time_error(self) -> Median:
        """The error that the predicted time bears."""
        return fitted().errors.get(self.time_kind, fitted().waiting)

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

        recomputed, kept = (
            replace(self.work, recomputed=layers, selective=False) for layers in (1, 0)
        )
        return LargestMicroBatch(largest(self.work), largest(recomputed), largest(kept))

    @cached_property
    def remarks(self) -> list[Remark]:
        """Warnings and advice."""
        return [*_of_layout(self), *_of_machine(self), *_of_speed(self)]

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
        ends = [before for before, _, _ in sizes.stretches[1:]]
        for (before, _, size), end in zip(sizes.stretches, (*ends, steps), strict=True):
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
        if other is not None:
            watts = self.node.gpu.watts * gpus + other * self.nodes
            energy = watts * seconds / 3.6e6
        price = self.node.gpu.price
        if usd_per_gpu_hour is not None:
            price = Price(usd_per_gpu_hour=usd_per_gpu_hour, where="--usd_per_gpu_hour")
        small = min(steps, sizes.stretches[-1][0])
        return Bill(
            steps, small, tokens, seconds, gpus * seconds / HOURS, energy, price
        )


def forecast(
    work: Workload,
    node: Node,
    constants: Constants | None = None,
    unit: int | None = None,
) -> Forecast:
    """Predict a step; by default with the fitted constants, and this global batch as the unit."""
    known = constants or fitted_constants()
    return Forecast(work, node, known, unit or work.layout.global_batch)


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
    seconds = {}
    if predicted.verdict != "fits" or predicted.time is None:
        return {}
    share = layout.micro * layout.accumulation
    for micro in divisors(math.gcd(share, predicted.unit // layout.dp)):
        if layout.micro < micro <= predicted.largest.as_planned:
            other = replace(layout, micro=micro, accumulation=share // micro)
            seconds[micro] = step_time(
                replace(work, layout=other), predicted.node, predicted.constants
            ).total
    best = min(seconds, key=seconds.__getitem__, default=0)
    gain = 1 - seconds.get(best, math.inf) / predicted.time.total
    return (
        {}
        if gain < LEAST_GAIN
        else {"micro": best, "accumulation": share // best, "gain": gain}
    )


def _of_layout(predicted: Forecast) -> Iterator[Remark]:
    work = predicted.work
    node = predicted.node
    layout = work.layout
    if not node.holds_groups(layout.tp, 1, layout.world):
        yield Remark("tensor across nodes", dict(tp=layout.tp, gpus=node.gpus))
    if predicted.nodes > 1 and node.network is None:
        yield Remark("network unknown", dict(node=node.name, rate=node.pcie_gb_s))
    if predicted.time and predicted.time.bubble_share > LARGE_BUBBLE:
        chunks = math.ceil(
            (layout.pp - 1) / work.interleave * (1 - LARGE_BUBBLE) / LARGE_BUBBLE
        )
        if chunks > layout.accumulation:
            yield Remark(
                "bubble",
                dict(
                    share=predicted.time.bubble_share,
                    chunks=chunks,
                    now=layout.accumulation,
                ),
            )
    if predicted.verdict == "snug":
        yield Remark("snug", dict(missing=-predicted.margin / 1e9))
    better = _better_micro(predicted)
    if better:
        yield Remark("larger batch", better)
    if (
        predicted.verdict == "fits"
        and work.recomputed
        and predicted.largest.kept >= layout.micro
    ):
        yield Remark("recomputation", dict(micro=layout.micro))


def _of_machine(predicted: Forecast) -> Iterator[Remark]:
    work = predicted.work
    node = predicted.node
    world = work.layout.world
    host = predicted.host / 1e9
    room = node.host.memory_gb
    if work.precision not in node.gpu.tflops:
        has = ", ".join(name for name in node.gpu.tflops if name != "fp32")
        yield Remark(
            "no precision",
            dict(precision=work.precision, gpu=node.gpu.title, has=has or "fp32"),
        )
    over = world % node.gpus if world > node.gpus else 0
    if over:
        yield Remark("partly filled node", dict(ranks=over, gpus=node.gpus))
    if host > room:
        yield Remark("host memory", dict(needed=host, there=room))
    saved = predicted.ranks_here * work.widths_of(0).saved * work.parameters_of(0)
    copy = (predicted.host + saved / work.layout.dp) / 1e9
    if host <= room < copy:
        yield Remark("saving waits", dict(needed=copy, there=room))
    if predicted.nvme and node.nvme_gb_s is None:
        yield Remark("nvme unknown", dict(node=node.name))


def _of_speed(predicted: Forecast) -> Iterator[Remark]:
    if predicted.time and predicted.speed:
        share = (
            100
            * predicted.speed.exact_tflops
            / predicted.node.gpu.tflops[predicted.work.precision]
        )
        small = predicted.time.elementwise + predicted.time.host
        if small > predicted.time.total / 2:
            yield Remark("kernel starts", dict(share=small / predicted.time.total))
        elif not LEAST_SHARE <= share <= MOST_SHARE:
            yield Remark("implausible", dict(share=share))
