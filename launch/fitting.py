"""Whether the model states of a row fit the GPUs, or the memory, of a machine: arithmetic on a resolved plan.

States are weights, gradients and Adam's (ZeRO paper, arXiv 1910.02054, section 3.1). Activations, buffers and fragmentation come on
top, so that "fits" is necessary and not sufficient.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ds_configs.layout import divisors
from ds_configs.resolver import ConfigError, Machine, Plan, resolve
from modeling import cost
from recipes.schema import Recipe

ANY_GPU = Machine("cuda", fp16=True, bf16=True, compiler=True, libaio=True)  # for resolving a row that is meant for another machine
OFFLOADED = {"none": (), "optimizer": ("optimizer",), "parameters": ("weights",), "optimizer+parameters": ("optimizer", "weights")}


@dataclass(frozen=True)
class Memory:
    """What a machine has: GPUs with this much memory each, or none and the memory of the host."""

    gpus: int
    gpu_bytes: float
    host_bytes: float

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''} of {self.gpu_bytes / 1e9:.3g} GB" if self.gpus else "no GPU"
        return f"{gpus}, {self.host_bytes / 1e9:.3g} GB of host memory"


def this_machine() -> Memory:
    """Imports torch."""
    import torch

    host = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Memory(gpus, float(torch.cuda.get_device_properties(0).total_memory) if gpus else 0.0, host)


def processes(recipe: Recipe) -> int:
    """tp x pp x dp as the recipe states them."""
    return recipe.parallel.tp * recipe.parallel.pp * (recipe.parallel.dp or 1)


def published_plan(recipe: Recipe) -> Plan:
    """The recipe with its own ds_config and number of processes, on GPUs that can do everything.

    Raises:
        ConfigError: it cannot run like that.
    """
    return resolve(recipe, recipe.ds_config, processes(recipe), ANY_GPU, {"MEGARECIPES_NVME": os.getcwd()})


def stage_parameters(plan: Plan) -> int:
    """Parameters on a rank of the fullest pipeline stage."""
    recipe, layout = plan.recipe, plan.layout
    layers = -(-recipe.model.layers // layout.pp)
    ends = [(True, True)] if layout.pp == 1 else [(True, False), (False, True)]
    return max(
        cost.parameters_per_rank(recipe.model, recipe.sequence_length, plan.padded_vocab, layout.tp, layers=layers, first=first, last=last)
        for first, last in ends
    )


def state_bytes(plan: Plan) -> tuple[float, float]:
    """Bytes of model states of one process: (on its GPU, offloaded to the host). NVMe counts as neither."""
    parameters, dp = stage_parameters(plan), plan.layout.dp
    mixed = plan.precision != "fp32"
    sizes = {"weights": 2, "gradients": 2, "optimizer": 12} if mixed else {"weights": 4, "gradients": 4, "optimizer": 8}
    sharded = {"optimizer": plan.zero_stage >= 1, "gradients": plan.zero_stage >= 2, "weights": plan.zero_stage >= 3}
    shares = {kind: parameters * size / (dp if sharded[kind] else 1) for kind, size in sizes.items()}
    if plan.offload == "nvme":
        return shares["gradients"], 0.0
    away = OFFLOADED[plan.offload]
    return sum(v for kind, v in shares.items() if kind not in away), sum(v for kind, v in shares.items() if kind in away)


def verdict(recipe: Recipe, memory: Memory) -> tuple[bool, str]:
    """(whether the row can be run on one such machine, how or why not)."""
    shared = recipe.parallel.tp * recipe.parallel.pp
    most = processes(recipe) if not memory.gpus else min(processes(recipe), memory.gpus)
    if memory.gpus and shared > memory.gpus:
        return False, f"tp x pp = {shared} processes, {memory.gpus} GPU{'s' if memory.gpus > 1 else ''} here"
    for dp in sorted((d for d in divisors(recipe.batch.global_) if d * shared <= most), reverse=True):
        try:
            plan = resolve(_with_dp(recipe, dp), recipe.ds_config, dp * shared, ANY_GPU, {"MEGARECIPES_NVME": os.getcwd()})
        except ConfigError:
            continue
        if _fits(plan, memory):
            same = dp == (recipe.parallel.dp or 1)
            return True, "as published" if same else f"with --set parallel.dp={dp}: {dp * shared} of {processes(recipe)} processes"
    least = min(most, shared)
    return False, f"{_smallest(recipe, least)} of model states"


def _with_dp(recipe: Recipe, dp: int) -> Recipe:
    parallel = recipe.parallel.model_copy(update={"dp": dp})
    return recipe.model_copy(update={"parallel": parallel, "batch": recipe.batch.model_copy(update={"accumulation": None})})


def _fits(plan: Plan, memory: Memory) -> bool:
    on_gpu, on_host = state_bytes(plan)
    world = plan.layout.world
    if memory.gpus:
        return on_gpu <= memory.gpu_bytes and on_host * world <= memory.host_bytes
    return (on_gpu + on_host) * world <= memory.host_bytes


def _smallest(recipe: Recipe, world: int) -> str:
    """What the fewest processes of the row would hold, each."""
    shared = recipe.parallel.tp * recipe.parallel.pp
    total = 16 * cost.parameters(recipe.model, recipe.sequence_length)
    return f"{total / 1e9:,.0f} GB over {shared} process{'es' if shared > 1 else ''}" if world else f"{total / 1e9:,.0f} GB"
