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


def compile_module(module: torch.nn.Module, plan: Plan) -> None:
    """torch.compile the whole model, or its transformer layers where something has to happen between them.

    That is the pipeline, which runs its layers itself, recomputation, and ZeRO-3, which gathers parameters in hooks of each
    layer; there `forward` alone is compiled, so that the hooks stay outside of it.
    """
    if isinstance(module, GPT2) and plan.zero_stage < 3 and not plan.recipe.checkpoint_interval:
        module.compile()
        return
    for layer in module.modules():
        if isinstance(layer, TransformerLayer):
            layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]


def measured_gain(plan: Plan, grid: ProcessGrid) -> str:
    """Time one transformer layer of the plan, forward and backward on a micro-batch, eager and compiled. Collective.

    A layer of its own, since the model's may be partitioned by ZeRO-3; `compare_layouts.py --compile` times whole steps.
    """
    recipe, layout = plan.recipe, plan.layout
    seed_step(recipe.seed, 0, grid.at)
    device = torch.device(get_accelerator().current_device_name())
    shape = LayerShape(recipe.model.hidden, recipe.model.heads, recipe.dropout.hidden, recipe.dropout.attention)
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, dtype=DTYPES[plan.precision])
    layer = TransformerLayer(shape, group=grid.tensor_group if grid.tp > 1 else None, init=init).to(device)
    x = torch.randn(layout.micro, recipe.sequence_length, recipe.model.hidden, dtype=init.dtype, device=device, requires_grad=True)
    started = time.perf_counter()
    eager = _seconds(layer, x)
    compiled = _seconds(torch.compile(layer), x)
    took = time.perf_counter() - started
    return (
        f"compiled: a transformer layer, forward and backward, takes {1e3 * compiled:.1f} ms instead of {1e3 * eager:.1f} ms "
        f"({eager / compiled:.2f}x; medians of {TIMED}, measured in {took:.0f} s)"
    )


def _seconds(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    times = []
    for _ in range(WARM_UP + TIMED):
        get_accelerator().synchronize()
        started = time.perf_counter()
        run(x).sum().backward()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])
