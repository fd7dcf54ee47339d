"""torch.compile under DeepSpeed: what is compiled in which layout, and what it gains, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from deepspeed.accelerator import get_accelerator

from ds_configs.resolver import Plan
from modeling.gpt2 import GPT2
from modeling.initialization import Init
from modeling.process_grid import ProcessGrid
from modeling.random_state import seed_step
from modeling.transformer import LayerShape, TransformerLayer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP, TIMED = 2, 5  # passes


def compile_module(module: torch.nn.Module, plan: Plan, grid: ProcessGrid) -> str:
    """torch.compile `module` in place before DeepSpeed takes it; return a line with the measured gain. Collective.

    The whole model is compiled, or its transformer layers and its loss where something has to happen between them: in the pipeline, which
    runs its layers itself, under recomputation, and under ZeRO-3, which gathers parameters in hooks of each layer; there
    `forward` alone is compiled, so that the hooks stay outside of it.
    """
    seed_step(plan.recipe.seed, 0, grid.at)
    started = time.perf_counter()
    if isinstance(module, GPT2) and plan.zero_stage < 3 and not plan.recipe.checkpoint_interval:
        what, eager, compiled = "forward and backward of a micro-batch", *_compile_whole(module, plan)
    else:
        what, eager, compiled = "forward and backward of one transformer layer", *_compile_layers(module, plan, grid)
    took = time.perf_counter() - started
    return (
        f"compiled: {what} takes {1e3 * compiled:.1f} ms instead of {1e3 * eager:.1f} ms ({eager / compiled:.2f}x; medians of {TIMED}; "
        f"compiling and measuring took {took:.0f} s)"
    )


def _compile_whole(module: GPT2, plan: Plan) -> tuple[float, float]:
    """Seconds eager and compiled, of the model itself; its gradients are dropped again."""
    device = torch.device(get_accelerator().current_device_name())
    module.to(device=device, dtype=DTYPES[plan.precision]).train()
    shape = (plan.layout.micro, plan.recipe.sequence_length)
    tokens = torch.randint(plan.recipe.model.vocab_size, shape, device=device)
    weights = torch.full(shape, 1 / tokens.numel(), device=device)
    eager = _seconds(lambda: module(tokens, tokens, weights))
    module.compile()
    compiled = _seconds(lambda: module(tokens, tokens, weights))
    module.zero_grad(set_to_none=True)
    return eager, compiled


def _compile_layers(module: torch.nn.Module, plan: Plan, grid: ProcessGrid) -> tuple[float, float]:
    """Seconds eager and compiled, of a layer of its own: those of the model may be partitioned, or lie on another stage."""
    for layer in module.modules():
        if isinstance(layer, TransformerLayer):
            layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
    if isinstance(module, GPT2):
        module.loss = torch.compile(module.loss)
    else:
        module.loss_fn = torch.compile(module.loss_fn)
    recipe, layout = plan.recipe, plan.layout
    device = torch.device(get_accelerator().current_device_name())
    shape = LayerShape(recipe.model.hidden, recipe.model.heads, recipe.dropout.hidden, recipe.dropout.attention)
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, dtype=DTYPES[plan.precision])
    layer = TransformerLayer(shape, group=grid.tensor_group if grid.tp > 1 else None, init=init).to(device)
    x = torch.randn(layout.micro, recipe.sequence_length, recipe.model.hidden, dtype=init.dtype, device=device, requires_grad=True)
    compiled = torch.compile(layer)
    return _seconds(lambda: layer(x).sum()), _seconds(lambda: compiled(x).sum())


def _seconds(loss: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(WARM_UP + TIMED):
        get_accelerator().synchronize()
        started = time.perf_counter()
        loss().backward()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])
