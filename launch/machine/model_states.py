"""Counted bytes of weights, gradients and optimizer states of one process under a resolved plan."""

from __future__ import annotations

from typing import Any

from ds_configs.plan import Plan
from modeling import cost

# of DeepSpeed's devices
PLACES: dict[str, cost.Place] = {"none": "gpu", "cpu": "host", "nvme": "nvme"}


def model_states(plan: Plan) -> cost.StateBytes:
    """Count the bytes on the fullest pipeline stage, by their place in an optimizer step."""
    recipe = plan.recipe
    layout = plan.layout
    zero = plan.ds.get("zero_optimization") or {}
    last = layout.pp - 1
    fullest = 0
    widths = state_widths(plan)
    for stage, layers in enumerate(
        cost.stages_of(recipe, plan.padded_vocab, layout.pp)
    ):
        parameters = cost.parameters_per_rank(
            recipe.model,
            recipe.positions,
            plan.padded_vocab,
            layout.tp,
            layers=layers,
            first=stage == 0,
            last=stage == last,
        )
        if parameters > fullest:
            fullest = parameters
            matrices = cost.hidden_matrices(recipe.model, layers, layout.tp)
    if recipe.optimizer.name == "muon":
        widths = widths.of_muon(fullest, matrices)
    return cost.placed_state_bytes(
        fullest,
        plan.zero_stage,
        layout.dp,
        widths=widths,
        places=places_of(plan),
        accumulates=layout.accumulation > 1,
        sub_group=zero.get("sub_group_size", 1e9),
    ).total


def places_of(plan: Plan) -> cost.Places:
    """Return where the resolved JSON has the optimizer states and the weights."""
    return cost.Places(
        *(PLACES[section.get("device") or "none"] for section in offloads(plan))
    )


def offloads(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sections offload_optimizer and offload_param of the resolved JSON; {} if missing."""
    zero = plan.ds.get("zero_optimization") or {}
    return zero.get("offload_optimizer") or {}, zero.get("offload_param") or {}


def state_widths(plan: Plan) -> cost.Widths:
    """Return the bytes of one number of each kind under the resolved JSON.

    DeepSpeed 0.19.8: `<half>_master_weights_and_grads` keeps the optimizer's weights and gradients in half
    precision. So does `bf16_optimizer_states` with Adam's moments on the GPU, and `fp32_optimizer_states:
    false` on the CPU (ops/adam/cpu_adam.py). `grad_accum_dtype` is the type of the gradients.
    """
    if plan.precision == "fp32":
        return cost.FP32
    ds = plan.ds
    half = plan.precision
    accumulated = (ds.get("data_types") or {}).get("grad_accum_dtype") or half
    gradient = 4 if accumulated == "fp32" else 2
    if not ds.get(half, {}).get(f"{half}_master_weights_and_grads"):
        return cost.Widths(gradient=gradient)
    params = (ds.get("optimizer") or {}).get("params") or {}
    halved = (
        ds.get(half, {}).get("bf16_optimizer_states")
        or params.get("fp32_optimizer_states") is False
    )
    moment = 2 if halved else 4
    return cost.Widths(gradient=gradient, master=2, moment=moment)
