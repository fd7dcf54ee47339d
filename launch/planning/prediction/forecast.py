"""The forecast of a step on given nodes: memory, time, verdict, cost of the run, remarks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from launch.planning.prediction import rank_memory
from launch.planning.prediction.constants import Constants, fitted_constants
from launch.planning.prediction.hardware import Node, Price
from launch.planning.prediction.rank_memory import RankMemory
from launch.planning.prediction.step_time import StepTime, step_time
from launch.planning.prediction.workload import Workload
from recipes.layout import BatchSchedule, divisors

Verdict = Literal["fits", "snug", "out of memory"]
LARGE_BUBBLE = 0.10
LEAST_GAIN = 0.01  # of a step's time, from which a larger micro-batch is advised
MOST_MICRO = 8191
# % of the peak rate, every product counted: what no published row of this repository leaves (it has 3 to 52).
LEAST_SHARE, MOST_SHARE = 1.0, 75.0
HOURS = 3600.0  # seconds


@dataclass(frozen=True)
class Remark:
    """A warning or advice about a plan.

    Attributes:
        kind: key of its sentence in `forecast_text.REMARKS`.
        values: numbers and names in the sentence.
    """

    kind: str
    values: dict[str, float | int | str]


@dataclass(frozen=True)
class LargestMicroBatch:
    """The largest micro-batches that fit: as planned, with every layer recomputed, with none; 0: none."""

    as_planned: int
    recomputed: int
    kept: int


@dataclass(frozen=True)
class Speed:
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
    """The prediction for a workload on nodes.

    Attributes:
        host, nvme: bytes in a node's host memory and on its NVMe.
        time: None if the GPU lacks the precision.
    """

    work: Workload
    node: Node
    nodes: int
    stages: list[RankMemory]
    host: float
    nvme: float
    verdict: Verdict
    largest: LargestMicroBatch
    time: StepTime | None
    speed: Speed | None
    remarks: list[Remark]

    @property
    def fullest_rank(self) -> RankMemory:
        """Memory of a rank of the fullest stage."""
        return max(self.stages, key=lambda rank: rank.total)

    @property
    def margin(self) -> float:
        """Bytes left on the fullest GPU beside all that torch would reserve; negative: missing."""
        return self.node.gpu.memory_bytes - self.fullest_rank.total

    def bill(self, steps: int, sizes: BatchSchedule, usd_per_gpu_hour: float | None = None) -> Bill | None:
        """Return time, energy and price of `steps` optimizer steps; None without a predicted time.

        `sizes`: of the steps; `usd_per_gpu_hour`: the user's price; None: the catalogue's.
        """
        if self.time is None:
            return None
        layout, constants = self.work.layout, fitted_constants(self.node.measured)
        gpus, seconds, tokens = layout.world, 0.0, 0
        ends = [before for before, _, _ in sizes.stretches[1:]]
        for (before, _, size), end in zip(sizes.stretches, (*ends, steps), strict=True):
            count = max(0, min(end, steps) - before)
            shares = replace(layout, accumulation=size // (layout.micro * layout.dp), global_batch=size)
            work = replace(self.work, layout=shares)
            seconds += count * step_time(work, self.node, constants).total if count else 0.0
            tokens += count * work.tokens_per_step
        other, watts = self.node.form.other_watts, self.node.gpu.watts * gpus
        energy = None if other is None else (watts + other * self.nodes) * seconds / 3.6e6
        price = self.node.gpu.price
        if usd_per_gpu_hour is not None:
            price = Price(usd_per_gpu_hour=usd_per_gpu_hour, where="--usd_per_gpu_hour")
        small = min(steps, sizes.stretches[-1][0])
        return Bill(steps, small, tokens, seconds, gpus * seconds / HOURS, energy, price)


def forecast(
    work: Workload, node: Node, constants: Constants | None = None, unit: int | None = None
) -> Forecast:
    """Predict a step on as many nodes as its layout needs; `unit`: micro x dp has to divide it."""
    constants = constants or fitted_constants(node.measured)
    layout, gpu = work.layout, node.gpu
    stages = rank_memory.of_stages(work, gpu, constants)
    here = min(layout.world, node.gpus)
    host, nvme = (here * max(getattr(rank, place) for rank in stages) for place in ("host", "nvme"))
    time = step_time(work, node, constants) if work.precision in gpu.tflops else None
    found = Forecast(
        work=work,
        node=node,
        nodes=math.ceil(layout.world / node.gpus),
        stages=stages,
        host=host,
        nvme=nvme,
        verdict=verdict_of(stages, host, node),
        largest=largest_micro(work, node, constants),
        time=time,
        speed=speed(work, node, time.total) if time else None,
        remarks=[],
    )
    return replace(found, remarks=_remarks(found, constants, unit or layout.global_batch))


def verdict_of(stages: list[RankMemory], host: float, node: Node) -> Verdict:
    """Judge whether ranks, with `host` bytes of a node's host memory, fit the node.

    fits: with all that torch would reserve; snug: once its allocator has given back what no tensor uses.
    """
    there = node.gpu.memory_bytes
    if max(rank.least for rank in stages) > there or host > node.form.host.memory_gb * 1e9:
        return "out of memory"
    return "snug" if max(rank.total for rank in stages) > there else "fits"


def speed(work: Workload, node: Node, seconds: float) -> Speed:
    """Return the rates of a step of `seconds`, predicted or measured."""
    gpus = work.layout.world
    return Speed(
        samples=work.layout.global_batch / seconds,
        tokens=work.tokens_per_step / seconds,
        tflops=work.published_tflops(seconds, gpus),
        exact_tflops=work.exact_tflops(seconds, gpus),
        mfu=work.exact_tflops(seconds, gpus, recomputation=False) / node.gpu.tflops[work.precision],
    )


def largest_micro(work: Workload, node: Node, constants: Constants) -> LargestMicroBatch:
    """Return the largest micro-batch for each kind of recomputation; host memory counts too."""
    here = min(work.layout.world, node.gpus)

    def largest(step: Workload) -> int:
        def fits(micro: int) -> bool:
            rank = rank_memory.fullest_rank(step.with_micro(micro), node.gpu, constants)
            return verdict_of([rank], rank.host * here, node) == "fits"

        return largest_number(fits, MOST_MICRO)

    recomputed, kept = (replace(work, recomputed=layers, selective=False) for layers in (1, 0))
    return LargestMicroBatch(largest(work), largest(recomputed), largest(kept))


def largest_number(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest fitting number from 1 to `most` by bisection; 0: none fits."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _better_micro(found: Forecast, constants: Constants, unit: int) -> dict[str, float | int]:
    """Return the fastest larger micro-batch that fits and makes the same global batch; {}: none."""
    work, layout, seconds = found.work, found.work.layout, {}
    if found.verdict != "fits" or found.time is None:
        return {}
    share = layout.micro * layout.accumulation
    for micro in divisors(math.gcd(share, unit // layout.dp)):
        if layout.micro < micro <= found.largest.as_planned:
            other = replace(layout, micro=micro, accumulation=share // micro)
            seconds[micro] = step_time(replace(work, layout=other), found.node, constants).total
    best = min(seconds, key=seconds.__getitem__, default=0)
    gain = 1 - seconds.get(best, math.inf) / found.time.total
    return {} if gain < LEAST_GAIN else {"micro": best, "accumulation": share // best, "gain": gain}


def _remarks(found: Forecast, constants: Constants, unit: int) -> list[Remark]:
    """Return the remarks on the forecast."""
    work, node, layout = found.work, found.node, found.work.layout
    said: list[Remark] = []

    def say(kind: str, **values: float | int | str) -> None:
        said.append(Remark(kind, values))

    if not node.holds_groups(layout.tp, 1, layout.world):
        say("tensor across nodes", tp=layout.tp, gpus=node.gpus)
    if found.nodes > 1 and node.form.network is None:
        say("network unknown", node=node.name, rate=node.form.pcie_gb_s)
    if found.time and found.time.bubble_share > LARGE_BUBBLE:
        chunks = math.ceil((layout.pp - 1) / work.interleave * (1 - LARGE_BUBBLE) / LARGE_BUBBLE)
        if chunks > layout.accumulation:
            say("bubble", share=found.time.bubble_share, chunks=chunks, now=layout.accumulation)
    if found.verdict == "snug":
        say("snug", missing=-found.margin / 1e9)
    if better := _better_micro(found, constants, unit):
        say("larger batch", **better)
    if found.verdict == "fits" and work.recomputed and found.largest.kept >= layout.micro:
        say("recomputation", micro=layout.micro)
    if work.precision not in node.gpu.tflops:
        has = ", ".join(name for name in node.gpu.tflops if name != "fp32")
        say("no precision", precision=work.precision, gpu=node.gpu.title, has=has or "fp32")
    if over := layout.world % node.gpus if layout.world > node.gpus else 0:
        say("partly filled node", ranks=over, gpus=node.gpus)
    if found.host > node.form.host.memory_gb * 1e9:
        say("host memory", needed=found.host / 1e9, there=node.form.host.memory_gb)
    copy = found.host + min(layout.world, node.gpus) * work.widths.saved * work.parameters_of(0) / layout.dp
    if not node.is_cpu and found.host <= node.form.host.memory_gb * 1e9 < copy:
        say("saving waits", needed=copy / 1e9, there=node.form.host.memory_gb)
    if found.nvme and node.form.nvme_gb_s is None:
        say("nvme unknown", node=node.name)
    if found.speed:
        share = 100 * found.speed.exact_tflops / node.gpu.tflops[work.precision]
        if found.time and found.time.elementwise > found.time.total / 2:
            say("kernel starts", share=found.time.elementwise / found.time.total)
        elif not LEAST_SHARE <= share <= MOST_SHARE:
            say("implausible", share=share)
    return said
