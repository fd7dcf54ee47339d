"""torch.compile under DeepSpeed: the parts to compile in each layout."""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch._inductor import cpp_builder

from ds_configs.plan import Plan
from launch.ranks import processes
from modeling.initialization import DTYPES
from modeling.layer_list import Stack
from modeling.transformer import Attention, TransformerLayer


def compile_module(module: torch.nn.Module, plan: Plan) -> str:
    """Have `module` compiled at its first step; return a line that names the parts. Call it before DeepSpeed.

    The whole model is compiled, or its transformer layers and its loss where other work lies between them: in
    the pipeline, under recomputation, on GPUs that average gradients while earlier layers are computed, and
    under ZeRO-3, which gathers parameters in hooks of each layer. Of a layer `forward` alone is compiled, so
    that the hooks stay outside.
    """
    keep_gcc_from_joining_statements()
    prepare(module, plan)
    if isinstance(module, Stack) and _compiles_whole(plan):
        module.compile()
        return "compiled in the first step: the whole model"
    for layer in module.modules():
        if isinstance(layer, TransformerLayer):
            layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
    if isinstance(module, Stack):
        module.loss = torch.compile(module.loss)
    else:
        last: Any = module.loss_fn
        last.function = torch.compile(last.function)
    return "compiled in the first step: every transformer layer, and the loss"


def keep_gcc_from_joining_statements() -> None:
    """Keep g++ from vectorizing neighbouring statements of the code that torch generates.

    On processors with AVX-512 that g++ 12.2 does not know by name, this vectorizing breaks torch's
    transposing copies of bf16, and attention computes NaN. Torch writes the code in vectors already.
    """
    flags_of = cpp_builder._get_optimization_cflags
    if hasattr(flags_of, "__wrapped__"):
        return

    @functools.wraps(flags_of)
    def with_flag(*args: Any, **kwargs: Any) -> Any:
        found = flags_of(*args, **kwargs)
        (found[0] if isinstance(found, tuple) else found).append(
            "fno-tree-slp-vectorize"
        )
        return found

    cpp_builder._get_optimization_cflags = with_flag


def _compiles_whole(plan: Plan) -> bool:
    """Decide whether a plain model is compiled whole: no other work lies between its layers."""
    averages = processes.device().asynchronous and plan.layout.dp > 1
    return plan.zero_stage < 3 and not plan.recipe.checkpoint_interval and not averages


def prepare(module: torch.nn.Module, plan: Plan) -> None:
    """Make the constants of attention before a graph is compiled."""
    device = torch.device(get_accelerator().current_device_name())
    for attention in module.modules():
        if isinstance(attention, Attention):
            attention.prepare(
                plan.recipe.sequence_length, device, DTYPES[plan.precision]
            )
