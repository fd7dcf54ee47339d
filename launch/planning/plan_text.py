"""The resolved plan as a person reads it before the run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_configs.plan import Plan
from modeling import cost
from recipes.family_words import WORDS


def describe_plan(
    plan: Plan,
    *,
    name: str,
    hardware: str,
    run_directory: Path | None,
    data: dict[str, Any] | None = None,
    here: bool = True,
) -> str:
    """A block of aligned lines. `data` is the corpus' summary, once it is known; `here`: the plan is for this machine."""
    recipe, layout = plan.recipe, plan.layout
    model, o, s = recipe.model, recipe.optimizer, recipe.schedule
    parameters = cost.parameters(model, recipe.sequence_length)
    mixed = plan.precision != "fp32"
    states = cost.model_state_bytes(
        parameters / (layout.tp * layout.pp), plan.zero_stage, layout.dp, mixed_precision=mixed
    )
    lines = [
        ("recipe", f"{name}: {recipe.title}"),
        ("model", f"{WORDS[model.family].describe(model)}, {model.layers} layers, hidden size {model.hidden}, {model.heads} heads, "
                  f"sequence length {recipe.sequence_length}, vocabulary {model.vocab_size} (padded to {plan.padded_vocab})"),
        *describe_attention(plan, here=here),
        ("parameters", f"{parameters:,}"),
        ("layout", f"{layout.tp} tensor x {layout.pp} pipeline x {layout.dp} data parallel = {layout.tp * layout.pp * layout.dp} "
                   f"process{'es' if layout.tp * layout.pp * layout.dp > 1 else ''}"),
        ("batch", layout.identity()),
        ("precision", plan.precision),
        ("ZeRO stage", f"{plan.zero_stage}, offload: {plan.offload}   ({plan.ds_name}.json)"),
        ("model states", f"{states / 1e9:.3g} GB per process (weights, gradients, optimizer; formula of the ZeRO paper"
                         f"{', before offloading' if plan.offload != 'none' else ''}), activations on top"),
        ("recomputed", {0: "nothing", 1: "every layer"}.get(recipe.checkpoint_interval, f"chunks of {recipe.checkpoint_interval} layers")),
        ("optimizer", f"AdamW, lr {o.lr:g}, betas {o.betas[0]:g} {o.betas[1]:g}, weight decay {o.weight_decay:g}, clip {o.clip:g}"),
        ("schedule", f"{s.kind}, {s.warmup_steps} warm-up steps, to {s.min_lr:g} at step {s.decay_steps or recipe.steps}; "
                     f"{recipe.steps} steps = {recipe.steps * layout.global_batch * recipe.sequence_length:,} tokens"),
    ]  # fmt: skip
    if data:
        tokens = f"{data['train_tokens']:,} training tokens, " if "train_tokens" in data else ""
        epochs = (
            recipe.steps * layout.global_batch / data["samples_per_epoch"]
            if data.get("samples_per_epoch")
            else None
        )
        seen = f"{epochs:.2f} epochs" if epochs else "streamed"
        lines.append(
            (
                "data",
                f"{data['source']}, {tokens}{seen}; {data['validation_samples']} validation samples of held-out documents",
            )
        )
    lines += [("hardware", hardware)]
    if run_directory:
        lines.append(("run directory", str(run_directory)))
    width = max(len(key) for key, _ in lines)
    text = "\n".join(f"  {key:<{width}}  {value}" for key, value in lines)
    return "\n".join([text, *(f"\n  ! {notice}" for notice in plan.notices)])


def describe_attention(plan: Plan, *, here: bool = True) -> list[tuple[str, str]]:
    """Of a model with banded layers: which they are, and unless the plan is for another machine the kernel that trains them."""
    model = plan.recipe.model
    if model.attention_window is None:
        return []
    banded = sum(window is not None for window in model.windows)
    kinds = f"layers {', '.join(model.attention)}, repeated: {banded} of {model.layers} see {model.attention_window} positions"
    if not here:
        return [("attention", kinds)]
    from launch.training.build_model import band_kernel

    return [("attention", kinds), ("  banded by", f"{band_kernel(plan)}")]
