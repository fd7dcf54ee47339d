"""The planner's memory of a row's plan, compared with the memory of a machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ds_configs.findings import ConfigError
from ds_configs.plan import Plan
from launch.machine.memory import Memory
from launch.planning.prediction import hardware, rank_memory, workload
from launch.planning.prediction.constants import fitted_constants
from launch.planning.prediction.forecast_text import memory_error
from launch.planning.resolved_plans import processes, published_plan
from recipes.layout import divisors
from recipes.problems import counted
from recipes.schema import Recipe

# node whose CUDA context stands for that of a GPU that nothing is said of
USUAL = "a100-80x8"


def memory_of_plan(plan: Plan, *, gpus: bool = True) -> rank_memory.RankMemory:
    """Predict the memory of a rank of the fullest pipeline stage, on the recipe's hardware if it names some.

    Without `gpus` all of it is the host's, and counts as far as a process has written to it.
    """
    own = plan.recipe.hardware
    name = own.node if own and own.node else USUAL
    gpu = hardware.find(name).gpu
    fullest = rank_memory.fullest_rank if gpus else rank_memory.fullest_process
    return fullest(workload.of_plan(plan), gpu, fitted_constants())


def describe(plan: Plan) -> str:
    """Describe the memory of a process of the fullest pipeline stage, by kind and place."""
    rank = memory_of_plan(plan)
    kinds = (
        ("model states", rank.states),
        ("activations", rank.activations + rank.working),
        ("loss", rank.logits),
        ("kept by torch's allocator", rank.fragmentation),
        ("other", rank.buffers + rank.context),
    )
    split = ", ".join(f"{name} {_gb(size)}" for name, size in kinds if size)
    away = ((rank.host, "in host memory"), (rank.nvme, "on NVMe"))
    more = "".join(f"; {_gb(size)} GB {place}" for size, place in away if size)
    return f"{_gb(rank.total)} GB per process, as predicted ({split}; {memory_error(plan.precision)}){more}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"


def verdict(recipe: Recipe, memory: Memory) -> tuple[bool, str]:
    """Return whether the row can run on such a machine, and how or why not."""
    shared = math.prod(recipe.parallel.model_parallel)
    fewer = recipe.parallel.dp is None or 0 < memory.gpus < processes(recipe)
    started = memory.gpus if fewer else processes(recipe)
    most = max(started, shared)
    if memory.gpus and shared > memory.gpus:
        return (
            False,
            f"tp x pp = {shared} processes, {counted(memory.gpus, 'GPU')} here",
        )
    refused = ""
    snug = ""
    too_large = []
    for dp in sorted(
        (dp for dp in divisors(recipe.batch.unit) if dp * shared <= most), reverse=True
    ):
        try:
            plan = published_plan(_with_dp(recipe, dp))
        except ConfigError as error:
            refused = str(error)
            continue
        room = (
            (memory.gpu_bytes, memory.host_bytes)
            if memory.gpus
            else (memory.host_bytes,)
        )
        if all(
            needed <= there
            for needed, there in zip(_needed(plan, memory), room, strict=True)
        ):
            return True, _how(recipe, dp, shared)
        least = _needed(plan, memory, kept=False)
        if not snug and all(
            needed <= there for needed, there in zip(least, room, strict=True)
        ):
            snug = f"{_how(recipe, dp, shared)}, snug"
        too_large.append(plan)
    if snug:
        return True, snug
    return False, _least(too_large, memory) if too_large else refused


def _how(recipe: Recipe, dp: int, shared: int) -> str:
    count = counted(dp * shared, "process")
    if recipe.parallel.dp is None:
        return f"on {count}"
    if dp == recipe.parallel.dp:
        guessed = any(
            key.partition(".")[0] in ("model", "parallel", "batch")
            for key in recipe.unknown
        )
        return (
            "as published"
            if recipe.published and not guessed
            else f"as it is, on {count}"
        )
    open_batch = " --set batch.accumulation=null" if recipe.batch.accumulation else ""
    return f"with --set parallel.dp={dp}{open_batch}: {dp * shared} of {processes(recipe)} processes"


def _with_dp(recipe: Recipe, dp: int) -> Recipe:
    """Set the data-parallel degree, as the text of `_how` says."""
    if dp == recipe.parallel.dp:
        return recipe
    parallel = recipe.parallel.model_copy(update={"dp": dp})
    left_open = {} if recipe.parallel.dp is None else {"accumulation": None}
    return recipe.model_copy(
        update={
            "parallel": parallel,
            "batch": recipe.batch.model_copy(update=left_open),
        }
    )


def _needed(plan: Plan, memory: Memory, *, kept: bool = True) -> tuple[float, ...]:
    """Return bytes on a GPU and in the host's memory; without GPUs all bytes on the host.

    kept: with what torch's allocator keeps.
    """
    rank = memory_of_plan(plan, gpus=memory.gpus > 0)
    world = plan.layout.world
    gpu = rank.total if kept else rank.least
    return (gpu, rank.host * world) if memory.gpus else ((gpu + rank.host) * world,)


def _least(plans: Sequence[Plan], memory: Memory) -> str:
    """Describe the smallest memory per process among the plans."""
    plan = min(plans, key=lambda plan: _needed(plan, memory))
    rank = memory_of_plan(plan, gpus=memory.gpus > 0)
    world = plan.layout.world
    sizes = [(rank.total + rank.host, "")]
    if memory.gpus:
        sizes = [(rank.total, " on the GPU"), (rank.host, " in host memory")]
    held = " and ".join(f"{size / 1e9:,.3g} GB{place}" for size, place in sizes if size)
    return f"{held} per process, {counted(world, 'process')}"
