"""The largest model for given GPUs, for each way of keeping its states."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ds_configs.plan import Plan
from ds_configs.resolver import resolve
from launch.planning.prediction import rank_memory, workload
from launch.planning.prediction.constants import fitted_constants
from launch.planning.prediction.forecast import Verdict, largest_number, verdict_of
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.rank_memory import RankMemory
from launch.planning.search.shapes import usual_layers
from launch.planning.search.ways import WAYS, Way
from modeling import cost
from recipes import catalog
from recipes.schema import Recipe
from recipes.tables import FOLDER, read_table

STEP = 128  # of the hidden size, times tensor ranks: whole heads on each
WIDE = 2048  # hidden size from which heads are of 128, as in GPT-3; below 64
MOST_HIDDEN = 2**17
MOST_LAYERS = 10_000
# Micro-batches of a pipeline's step, as in Jean Zay's tables of maximal sizes.
CHUNKS = 4
MAXIMAL_SIZES = ("jeanzay_megatron_max_size_16gb", "jeanzay_megatron_max_size_32gb")
# "Optimizing Large-Scale GPT Models Pretraining" (SberDevices): "practical upper bound of GPT model size per
# GPU", and its bytes per parameter: fp32, mixed precision as it counts that, and with gradients.
PRINTED_LIMITS = {"v100-32": 2.0e9, "v100-32-pcie": 2.0e9, "2080ti": 0.7e9}
BYTES_PER_PARAMETER = (12, 14, 16)


@dataclass(frozen=True)
class Setting:
    """The common part of all configurations: recipe, nodes, micro-batch.

    Attributes:
        recipe: gives family, sequence length and precision; its shape is replaced.
    """

    recipe: Recipe
    node: Node
    nodes: int
    micro: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.node.gpus


class Configuration(NamedTuple):
    """A way of keeping model states over `tp` tensor ranks and `pp` stages; `recomputed`: every layer."""

    way: Way
    tp: int
    recomputed: bool
    pp: int = 1


@dataclass(frozen=True)
class LargestModel:
    """The largest model of a configuration.

    Attributes:
        layers, hidden, heads: the shape; of the smallest model if none fits.
        memory: memory of a rank; host: bytes in a node's host memory.
        on_host: host memory is the tighter limit.
    """

    configuration: Configuration
    layers: int
    hidden: int
    heads: int
    parameters: int
    memory: RankMemory
    host: float
    on_host: bool
    verdict: Verdict


def largest(setting: Setting) -> list[LargestModel]:
    """Find the largest model of each way, of ZeRO-1 over a node and of a stage on each node.

    Each without and with recomputation.
    """
    degrees = [(way, 1, 1) for way in WAYS if way.offload is None]
    if setting.node.gpus > 1:
        degrees.append((WAYS[1], setting.node.gpus, 1))
    if setting.nodes > 1:
        degrees.append((WAYS[1], setting.node.gpus, setting.nodes))
    return [
        largest_of(setting, Configuration(way, tp, recomputed, pp))
        for way, tp, pp in degrees
        for recomputed in (False, True)
    ]


def largest_of(setting: Setting, configuration: Configuration) -> LargestModel:
    """Find the largest hidden size with a usual number of layers, then the most layers, equal stages."""
    step, pp = STEP * configuration.tp, configuration.pp

    def fits(layers: int, hidden: int) -> bool:
        return _model(setting, configuration, layers, hidden).verdict == "fits"

    def usual(hidden: int) -> int:
        return math.ceil(usual_layers(hidden) / pp) * pp

    units = largest_number(lambda unit: fits(usual(unit * step), unit * step), MOST_HIDDEN // step)
    hidden = max(1, units) * step
    layers = pp * max(1, largest_number(lambda each: fits(each * pp, hidden), MOST_LAYERS // pp))
    return _model(setting, configuration, layers, hidden)


def plan_of(setting: Setting, configuration: Configuration, layers: int, hidden: int) -> Plan:
    """Resolve a model of that shape. Raises ConfigError."""
    recipe, (way, tp, recomputed, pp) = setting.recipe, configuration
    heads = hidden // (128 if hidden >= WIDE and hidden % (128 * tp) == 0 else 64)
    dp, micro, accumulation = setting.ranks // (tp * pp), setting.micro, CHUNKS if pp > 1 else 1
    shape = {"layers": layers, "hidden": hidden, "heads": heads}
    total = micro * accumulation * dp
    batch = {"micro": micro, "accumulation": accumulation, "global_": total, "rampup": None}
    changed = {
        "model": recipe.model.model_copy(update=shape),
        "parallel": recipe.parallel.model_copy(update={"tp": tp, "pp": pp, "dp": dp}),
        "batch": recipe.batch.model_copy(update=batch),
        "activation_checkpointing": "full" if recomputed else "none",
    }
    return resolve(recipe.model_copy(update=changed), way.file, setting.ranks, setting.node.machine)


def _model(setting: Setting, configuration: Configuration, layers: int, hidden: int) -> LargestModel:
    node = setting.node
    work = workload.of_plan(plan_of(setting, configuration, layers, hidden))
    rank = rank_memory.fullest_rank(work, node.gpu, fitted_constants(node.measured))
    host = min(setting.ranks, node.gpus) * rank.host
    share = host / (node.form.host.memory_gb * 1e9)
    return LargestModel(
        configuration,
        layers,
        hidden,
        work.model.heads,
        cost.parameters(work.model, work.positions),
        memory=rank,
        host=host,
        on_host=share > rank.total / node.gpu.memory_bytes,
        verdict=verdict_of([rank], host, node),
    )


def printed_maxima(setting: Setting) -> list[Recipe]:
    """Return the documents' largest models on as many such nodes, of one replica over all of them."""
    rows = [f"{table}/{row}" for table in MAXIMAL_SIZES for row in read_table(FOLDER / f"{table}.yaml").rows]
    found = []
    for recipe in map(catalog.load, rows):
        own, replica = recipe.hardware, math.prod(recipe.parallel.model_parallel)
        if own and own.node == setting.node.name and own.gpus == replica == setting.ranks:
            found.append(recipe)
    return found


def parameters_by_rule(node: Node) -> dict[int, float]:
    """Map the documents' bytes per parameter to the parameters with room on one GPU."""
    return {size: node.gpu.memory_bytes / size for size in BYTES_PER_PARAMETER}
