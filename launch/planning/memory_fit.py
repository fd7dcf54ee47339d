"""Whether the model states of a row fit the GPUs, or the memory, of a machine: arithmetic on a resolved plan.

States are weights, gradients and Adam's, where DeepSpeed has them while it steps (`cost.placed_state_bytes`).
Activations, buffers and fragmentation come on top, so that "fits" is necessary and not sufficient.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from typing import Any

from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from ds_configs.sections.zero import NVME_VARIABLE
from launch.machine.memory import Memory
from modeling import cost
from recipes.layout import divisors
from recipes.schema import Recipe

ANY_GPU = Machine(
    "cuda", fp16=True, bf16=True, compiler=True, libaio=True
)  # for resolving a row that is meant for another machine
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


def _offloads(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections offload_optimizer and offload_param of the resolved JSON; empty where there is none."""
    zero = plan.ds.get("zero_optimization") or {}
    return zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}


def stage_parameters(plan: Plan) -> int:
    """Parameters on a rank of the fullest pipeline stage."""
    recipe, layout = plan.recipe, plan.layout
    layers = -(-recipe.model.layers // layout.pp)
    ends = [(True, True)] if layout.pp == 1 else [(True, False), (False, True)]
    return max(
        cost.parameters_per_rank(
            recipe.model,
            recipe.sequence_length,
            plan.padded_vocab,
            layout.tp,
            layers=layers,
            first=first,
            last=last,
        )
        for first, last in ends
    )


def state_bytes(plan: Plan) -> cost.StateBytes:
    """Bytes of model states of a process of the fullest pipeline stage, while it steps."""
    optimizer, weights = (PLACES[section.get("device") or "none"] for section in _offloads(plan))
    return cost.placed_state_bytes(
        stage_parameters(plan),
        plan.zero_stage,
        plan.layout.dp,
        mixed_precision=plan.precision != "fp32",
        optimizer=optimizer,
        weights=weights,
        accumulates=plan.layout.accumulation > 1,
        sub_group=(plan.ds.get("zero_optimization") or {}).get("sub_group_size", 1e9),
    )


def verdict(recipe: Recipe, memory: Memory) -> tuple[bool, str]:
    """(whether the row can be run on one such machine, how or why not)."""
    shared = math.prod(recipe.parallel.model_parallel)
    most = (
        memory.gpus
        if recipe.parallel.dp is None or 0 < memory.gpus < processes(recipe)
        else processes(recipe)
    )
    if memory.gpus and shared > memory.gpus:
        return False, f"tp x pp = {shared} processes, {memory.gpus} GPU{'s' if memory.gpus > 1 else ''} here"
    refused, too_large = "", []
    for dp in sorted(
        (d for d in divisors(recipe.batch.global_) if d * shared <= max(most, shared)), reverse=True
    ):
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
    count = f"{dp * shared} process{'es' if dp * shared > 1 else ''}"
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
    batch = (
        recipe.batch if recipe.parallel.dp is None else recipe.batch.model_copy(update={"accumulation": None})
    )
    return recipe.model_copy(
        update={"parallel": recipe.parallel.model_copy(update={"dp": dp}), "batch": batch}
    )


def _fits(plan: Plan, memory: Memory) -> bool:
    states, world = state_bytes(plan), plan.layout.world
    if memory.gpus:
        return states.gpu <= memory.gpu_bytes and states.host * world <= memory.host_bytes
    return (states.gpu + states.host) * world <= memory.host_bytes


def _least(plans: Sequence[Plan], memory: Memory) -> str:
    """What a process of the plan that needs the least on a GPU (in all, where there is none) would hold."""

    def needed(plan: Plan) -> tuple[float, ...]:
        states, world = state_bytes(plan), plan.layout.world
        return (states.gpu, states.host * world) if memory.gpus else ((states.gpu + states.host) * world,)

    plan = min(plans, key=needed)
    states, world = state_bytes(plan), plan.layout.world
    sizes = (
        [(states.gpu, " on the GPU"), (states.host, " in host memory")]
        if memory.gpus
        else [(states.gpu + states.host, "")]
    )
    held = " and ".join(f"{size / 1e9:,.3g} GB{place}" for size, place in sizes if size)
    return f"model states of {held} per process, {world} process{'es' if world > 1 else ''}"
