"""The largest model that given GPUs train, for each way of keeping its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ds_configs.plan import Plan
from ds_configs.resolver import resolve
from launch.planning.prediction import rank_memory, workload
from launch.planning.prediction.constants import Constants, fitted
from launch.planning.prediction.forecast import Verdict, verdict_of
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.rank_memory import RankMemory
from launch.planning.search.shapes import usual_layers
from launch.planning.search.ways import WAYS, Way
from modeling import cost
from recipes.schema import Recipe

STEP = 128  # of the hidden size, times tensor ranks: whole heads on each
WIDE = 2048  # hidden size from which heads are of 128, as in GPT-3; below 64
MOST_HIDDEN = 2**17
MOST_LAYERS = 10_000
# "Optimizing Large-Scale GPT Models Pretraining" (SberDevices): "practical upper bound of GPT model size per
# GPU", and its bytes per parameter: fp32, mixed precision as it counts that, and with gradients.
PRINTED = {"v100-32": 2.0e9, "v100-32-pcie": 2.0e9, "2080ti": 0.7e9}
RULES = (12, 14, 16)


@dataclass(frozen=True)
class Setting:
    """What is asked of every configuration.

    Attributes:
        recipe: of the family, sequence length and precision; its shape is replaced.
        nodes: whose GPUs all take part.
    """

    recipe: Recipe
    node: Node
    nodes: int
    micro: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.node.gpus


@dataclass(frozen=True)
class LargestModel:
    """The largest of a configuration.

    Attributes:
        layers, hidden, heads: 0: not even the smallest fits.
        memory: of a rank; host: bytes in a node's host memory.
        on_host: host memory is what it would run out of first.
    """

    way: Way
    tp: int
    recomputed: bool
    layers: int
    hidden: int
    heads: int
    parameters: int
    memory: RankMemory
    host: float
    on_host: bool
    verdict: Verdict


def largest(setting: Setting, constants: Constants | None = None) -> list[LargestModel]:
    """Without and with recomputation: each file's way, and ZeRO-1 with a node's GPUs as tensor ranks."""
    degrees = [(way, 1) for way in WAYS if way.offload is None]
    if setting.node.gpus > 1:
        degrees.append((WAYS[1], setting.node.gpus))
    constants = constants or fitted(setting.node.measured)
    return [
        _largest(setting, way, tp, recomputed, constants)
        for way, tp in degrees
        for recomputed in (False, True)
    ]


def _largest(setting: Setting, way: Way, tp: int, recomputed: bool, constants: Constants) -> LargestModel:
    """First the largest hidden size with as many layers as is usual, then as many layers as fit."""
    step = STEP * tp

    def tried(layers: int, hidden: int) -> LargestModel:
        return _model(setting, way, tp, recomputed, layers, hidden, constants)

    def fits(layers: int, hidden: int) -> bool:
        return tried(layers, hidden).verdict != "out of memory"

    units = _most(lambda unit: fits(usual_layers(unit * step), unit * step), MOST_HIDDEN // step)
    hidden = max(1, units) * step
    return tried(max(1, _most(lambda layers: fits(layers, hidden), MOST_LAYERS)), hidden)


def _most(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that has what all smaller ones have; 0: none."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def plan_of(setting: Setting, way: Way, tp: int, recomputed: bool, layers: int, hidden: int) -> Plan:
    """Such a model as it would be launched. Raises ConfigError."""
    recipe = setting.recipe
    heads = hidden // (128 if hidden >= WIDE and hidden % (128 * tp) == 0 else 64)
    dp = setting.ranks // tp
    changed = {
        "model": recipe.model.model_copy(update={"layers": layers, "hidden": hidden, "heads": heads}),
        "parallel": recipe.parallel.model_copy(update={"tp": tp, "pp": 1, "dp": dp}),
        "batch": recipe.batch.model_copy(
            update={"micro": setting.micro, "accumulation": 1, "global_": setting.micro * dp}
        ),
        "activation_checkpointing": "full" if recomputed else "none",
    }
    machine = setting.node.machine
    return resolve(recipe.model_copy(update=changed), way.file, setting.ranks, machine)


def _model(
    setting: Setting, way: Way, tp: int, recomputed: bool, layers: int, hidden: int, constants: Constants
) -> LargestModel:
    node, plan = setting.node, plan_of(setting, way, tp, recomputed, layers, hidden)
    work = workload.of_plan(plan)
    rank = rank_memory.of_stage(work, 0, node.gpu, constants)
    host = min(setting.ranks, node.gpus) * rank.host
    share = host / (node.form.host.memory_gb * 1e9)
    size = cost.parameters(work.model, work.positions)
    return LargestModel(
        way, tp, recomputed, layers, hidden, work.model.heads, size, rank, host,
        share > rank.total / node.gpu.memory_bytes, verdict_of([rank], host, node),
    )  # fmt: skip


def by_rule(node: Node) -> Iterator[tuple[int, float]]:
    """(bytes per parameter, parameters that this leaves room for) on one GPU, as the documents count."""
    yield from ((size, node.gpu.memory_bytes / size) for size in RULES)
