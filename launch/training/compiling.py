"""torch.compile under DeepSpeed: what is compiled in which layout, and what it gains, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from ds_configs.plan import Plan
from launch.training.build_model import layer_kinds, model_shape
from launch.training.micro_batches import BERT_INPUTS, BERT_TARGETS
from modeling.dtypes import DTYPES
from modeling.initialization import Init
from modeling.layer_list import Stack
from modeling.parallel.process_grid import ProcessGrid
from modeling.parallel.random_state import seed_step
from modeling.transformer import Attention, LayerShape, TransformerLayer

WARM_UP, TIMED = 2, 5  # passes


class Gain(NamedTuple):
    """Seconds of a forward and backward pass of `what`."""

    what: str
    eager: float
    compiled: float

    def __str__(self) -> str:
        return f"{self.what} {1e3 * self.compiled:.1f} ms instead of {1e3 * self.eager:.1f} ms ({self.eager / self.compiled:.2f}x)"


def compile_module(module: torch.nn.Module, plan: Plan, grid: ProcessGrid) -> str:
    """torch.compile `module` in place before DeepSpeed takes it; return a line with the measured gains. Collective.

    The whole model is compiled, or its transformer layers and its loss where something has to happen between them: in the pipeline, which
    runs its layers itself, under recomputation, and under ZeRO-3, which gathers parameters in hooks of each layer; there
    `forward` alone is compiled, so that the hooks stay outside of it.
    """
    seed_step(plan.recipe.seed, 0, grid.at)
    started = time.perf_counter()
    prepare(module, plan)
    if isinstance(module, Stack) and plan.zero_stage < 3 and not plan.recipe.checkpoint_interval:
        gains = [Gain("a micro-batch", *_compile_whole(module, plan))]
    else:
        gains = _compile_layers(module, plan, grid)
    took = time.perf_counter() - started
    said = ", ".join(map(str, gains))
    return f"compiled: forward and backward of {said}; medians of {TIMED}; compiling and measuring took {took:.0f} s"


def prepare(module: torch.nn.Module, plan: Plan) -> None:
    """What the attention of the recipe's sequences needs and no graph should hold."""
    device = torch.device(get_accelerator().current_device_name())
    for attention in module.modules():
        if isinstance(attention, Attention):
            attention.prepare(plan.recipe.sequence_length, device, DTYPES[plan.precision])


def _compile_whole(module: Stack, plan: Plan) -> tuple[float, float]:
    """Seconds eager and compiled, of the model itself; its gradients are dropped again."""
    device = torch.device(get_accelerator().current_device_name())
    module.to(device=device, dtype=DTYPES[plan.precision]).train()
    batch = _random_batch(plan, device)

    def loss() -> torch.Tensor:
        outcome = module(*batch)
        return outcome[0] if isinstance(outcome, tuple) else outcome

    eager = _seconds(loss)
    module.compile()
    compiled = _seconds(loss)
    module.zero_grad(set_to_none=True)
    return eager, compiled


def _compile_layers(module: torch.nn.Module, plan: Plan, grid: ProcessGrid) -> list[Gain]:
    """Of every kind of layer, measured on one of its own: those of the model may be partitioned, or lie on another stage."""
    for layer in module.modules():
        if isinstance(layer, TransformerLayer):
            layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
    if isinstance(module, Stack):
        module.loss = torch.compile(module.loss)
    else:
        module.loss_fn.function = torch.compile(module.loss_fn.function)
    kinds, layers = layer_kinds(model_shape(plan.recipe, plan.padded_vocab)), plan.recipe.model.layers
    if len(kinds) == 1:
        return [Gain("one transformer layer", *_time_layer(shape, plan, grid)) for shape in kinds]
    return [
        Gain(
            f"one {'dense' if shape.window is None else 'banded'} layer ({count} of {layers})",
            *_time_layer(shape, plan, grid),
        )
        for shape, count in kinds.items()
    ]


def _time_layer(shape: LayerShape, plan: Plan, grid: ProcessGrid) -> tuple[float, float]:
    """Seconds eager and compiled, on a random micro-batch."""
    recipe = plan.recipe
    device = torch.device(get_accelerator().current_device_name())
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, dtype=DTYPES[plan.precision])
    layer = TransformerLayer(shape, group=grid.tensor_group if grid.tp > 1 else None, init=init).to(device)
    prepare(layer, plan)
    size = (plan.layout.micro, recipe.sequence_length, recipe.model.hidden)
    x = torch.randn(size, dtype=init.dtype, device=device, requires_grad=True)
    compiled = torch.compile(layer)
    return _seconds(lambda: layer(x).sum()), _seconds(lambda: compiled(x).sum())


def _random_batch(plan: Plan, device) -> tuple[torch.Tensor, ...]:
    """Arguments of the plain model: random tokens, and for a BERT random predictions of samples without padding."""
    recipe, micro = plan.recipe, plan.layout.micro
    tokens = torch.randint(recipe.model.vocab_size, (micro, recipe.sequence_length), device=device)
    if recipe.model.family == "gpt2":
        return tokens, tokens, torch.full(tokens.shape, 1 / tokens.numel(), device=device)
    positions = torch.randint(recipe.sequence_length, (micro, recipe.predictions), device=device)
    batch = {
        "tokens": tokens, "token_types": torch.zeros_like(tokens), "lengths": None, "positions": positions,
        "labels": tokens.gather(1, positions), "weights": torch.full(positions.shape, 1 / positions.numel(), device=device),
        "sentence_labels": tokens[:, 0] % 2, "sentence_weights": torch.full((micro,), 1 / micro, device=device),
    }  # fmt: skip
    return tuple(batch[key] for key in (*BERT_INPUTS, *BERT_TARGETS))


def _seconds(loss: Callable[[], torch.Tensor]) -> float:
    times = []
    for _ in range(WARM_UP + TIMED):
        get_accelerator().synchronize()
        started = time.perf_counter()
        loss().backward()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[WARM_UP:])
