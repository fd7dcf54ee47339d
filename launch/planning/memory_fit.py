"""Whether the model states of a row fit the GPUs, or the memory, of a machine: arithmetic on a resolved plan.

States are weights, gradients and Adam's, where DeepSpeed has them while it steps (`cost.placed_state_bytes`).
Activations, buffers and fragmentation come on top, so that "fits" is necessary and not sufficient.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_configs.findings import Notice
from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from ds_configs.sections.zero import NVME_VARIABLE
from launch.machine.memory import Memory
from modeling import cost
from recipes.layout import divisors
from recipes.plural import counted
from recipes.schema import Recipe

# For resolving a row that is meant for another machine: it refuses nothing.
ANY_GPU = Machine("cuda", fp16=True, bf16=True, compiler=True, libaio=True)
PLACES = {"none": "gpu", "cpu": "host", "nvme": "nvme"}  # of DeepSpeed's offload devices


def processes(recipe: Recipe) -> int:
    """tp x pp x dp as the recipe states them."""
    return math.prod(recipe.parallel.model_parallel) * (recipe.parallel.dp or 1)


def published_plan(recipe: Recipe, world: int | None = None) -> Plan:
    """The recipe with its own ds_config and number of processes (or `world`), on GPUs that can do everything.

    A path that the other machine's environment gives is left as $MEGARECIPES_NVME.

    Raises:
        ConfigError: it cannot run like that.
    """
    stand_in = tempfile.gettempdir()  # the resolver wants a directory that is there
    plan = resolve(recipe, recipe.ds_config, world or processes(recipe), ANY_GPU, {NVME_VARIABLE: stand_in})
    for section in _offloads(plan):
        if section.get("nvme_path") == stand_in:
            section["nvme_path"] = f"${NVME_VARIABLE}"
    return plan


def anywhere(recipe: Recipe, ds_config: str, machine: Machine) -> Plan:
    """The plan of as many processes as the layout asks for.

    Where `machine` alone is in the way, it is a plan for a GPU that can do everything, and a notice says so.
    Raises ConfigError: it cannot run on any machine.
    """
    try:
        return resolve(recipe, ds_config, None, machine)
    except ConfigError as refused:
        try:
            plan = resolve(recipe, ds_config, None, ANY_GPU)
        except ConfigError:
            raise refused from None
        here = [Notice("machine", f"refused on this machine: {problem}") for problem in refused.problems]
        return replace(plan, notices=(*plan.notices, *here))


def _offloads(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections offload_optimizer and offload_param of the resolved JSON; empty where there is none."""
    zero = plan.ds.get("zero_optimization") or {}
    return zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}


def stage_parameters(plan: Plan) -> int:
    """Parameters on a rank of the fullest pipeline stage."""
    recipe, layout = plan.recipe, plan.layout
    layers = -(-recipe.model.layers // layout.pp)
    ends = [(True, True)] if layout.pp == 1 else [(True, False), (False, True)]
    sizes = (recipe.model, recipe.sequence_length, plan.padded_vocab, layout.tp)
    return max(
        cost.parameters_per_rank(*sizes, layers=layers, first=first, last=last) for first, last in ends
    )


def state_bytes(plan: Plan) -> cost.StateBytes:
    """Bytes of model states of a process of the fullest pipeline stage, while it steps."""
    optimizer, weights = (PLACES[section.get("device") or "none"] for section in _offloads(plan))
    zero, layout = plan.ds.get("zero_optimization") or {}, plan.layout
    how = {"optimizer": optimizer, "weights": weights, "sub_group": zero.get("sub_group_size", 1e9)}
    how |= {"widths": state_widths(plan), "accumulates": layout.accumulation > 1}
    return cost.placed_state_bytes(stage_parameters(plan), plan.zero_stage, layout.dp, **how)


def state_widths(plan: Plan) -> cost.Widths:
    """Bytes of a number of each kind, as the resolved JSON has them.

    DeepSpeed 0.19.8: `<half>_master_weights_and_grads` keeps the optimizer's weights, and the gradients that
    it takes, in half precision; Adam's moments follow with `bf16_optimizer_states` on the GPU, and on the CPU
    with `fp32_optimizer_states: false` (ops/adam/cpu_adam.py); `grad_accum_dtype` is that of the gradients.
    """
    if plan.precision == "fp32":
        return cost.FP32
    ds, half = plan.ds, plan.precision
    accumulated = (ds.get("data_types") or {}).get("grad_accum_dtype") or half
    gradient = 4 if accumulated == "fp32" else 2
    if not ds.get(half, {}).get(f"{half}_master_weights_and_grads"):
        return cost.Widths(gradient=gradient)
    params = (ds.get("optimizer") or {}).get("params") or {}
    halved = ds.get(half, {}).get("bf16_optimizer_states") or params.get("fp32_optimizer_states") is False
    return cost.Widths(gradient=gradient, master=2, moment=2 if halved else 4)


def verdict(recipe: Recipe, memory: Memory) -> tuple[bool, str]:
    """(whether the row can be run on one such machine, how or why not)."""
    shared = math.prod(recipe.parallel.model_parallel)
    fewer = recipe.parallel.dp is None or 0 < memory.gpus < processes(recipe)
    most = max(memory.gpus if fewer else processes(recipe), shared)
    if memory.gpus and shared > memory.gpus:
        return False, f"tp x pp = {shared} processes, {counted(memory.gpus, 'GPU')} here"
    refused, too_large = "", []
    for dp in sorted((dp for dp in divisors(recipe.batch.global_) if dp * shared <= most), reverse=True):
        try:
            plan = published_plan(_with_dp(recipe, dp))
        except ConfigError as error:
            refused = str(error)
            continue
        if _fits(plan, memory):
            return True, _how(recipe, dp, shared)
        too_large.append(plan)
    return False, _least(too_large, memory) if too_large else refused


def _how(recipe: Recipe, dp: int, shared: int) -> str:
    count = counted(dp * shared, "process")
    if recipe.parallel.dp is None:
        return f"on {count}"
    if dp == recipe.parallel.dp:
        guessed = any(key.partition(".")[0] in ("model", "parallel", "batch") for key in recipe.unknown)
        return "as published" if recipe.published and not guessed else f"as it is, on {count}"
    open_batch = " --set batch.accumulation=null" if recipe.batch.accumulation else ""
    return f"with --set parallel.dp={dp}{open_batch}: {dp * shared} of {processes(recipe)} processes"


def _with_dp(recipe: Recipe, dp: int) -> Recipe:
    """What `_how` tells the user to set."""
    if dp == recipe.parallel.dp:
        return recipe
    parallel = recipe.parallel.model_copy(update={"dp": dp})
    left_open = {} if recipe.parallel.dp is None else {"accumulation": None}
    return recipe.model_copy(
        update={"parallel": parallel, "batch": recipe.batch.model_copy(update=left_open)}
    )


def _fits(plan: Plan, memory: Memory) -> bool:
    room = (memory.gpu_bytes, memory.host_bytes) if memory.gpus else (memory.host_bytes,)
    return all(needed <= there for needed, there in zip(_needed(plan, memory), room, strict=True))


def _needed(plan: Plan, memory: Memory) -> tuple[float, ...]:
    """Bytes on a GPU and in the host's memory; without GPUs all in the host's."""
    states, world = state_bytes(plan), plan.layout.world
    return (states.gpu, states.host * world) if memory.gpus else ((states.gpu + states.host) * world,)


def _least(plans: Sequence[Plan], memory: Memory) -> str:
    """What a process of the plan that needs the least on a GPU (in all, where there is none) would hold."""
    plan = min(plans, key=lambda plan: _needed(plan, memory))
    states, world = state_bytes(plan), plan.layout.world
    sizes = [(states.gpu + states.host, "")]
    if memory.gpus:
        sizes = [(states.gpu, " on the GPU"), (states.host, " in host memory")]
    held = " and ".join(f"{size / 1e9:,.3g} GB{place}" for size, place in sizes if size)
    return f"model states of {held} per process, {counted(world, 'process')}"
