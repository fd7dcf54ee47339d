"""torch.compile under DeepSpeed: the parts to compile in each layout, and the measured gain."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch._inductor import cpp_builder
from torch.nn.functional import linear

from ds_configs.plan import Plan
from launch.ranks import processes
from launch.training.micro_batches import for_plain, random_batch
from modeling.families import family_of, model_shape
from modeling.hidden_dropout import salts_of
from modeling.initialization import DTYPES, Init
from modeling.layer_list import Stack
from modeling.parallel.collectives import own_positions
from modeling.parallel.layers import group_size
from modeling.parallel.process_grid import ProcessGrid
from modeling.parallel.random_state import seed_step
from modeling.transformer import Attention, LayerShape, TransformerLayer
from recipes.attention_patterns import kind_of

WARM_UP, TIMED = 2, 5  # passes
USUAL_COST = 40.0  # seconds, measuring included; two cores took 33 to 47


@dataclass(frozen=True)
class Gain:
    """Seconds of a forward and backward pass of `what`; a micro-batch makes `times` such passes."""

    what: str
    eager: float
    compiled: float
    times: float = 1.0

    def __str__(self) -> str:
        times = f"{1e3 * self.compiled:.1f} ms instead of {1e3 * self.eager:.1f} ms"
        return f"{self.what} {times} ({self.eager / self.compiled:.2f}x)"


def payback(gains: Sequence[Gain], took: float, accumulation: int, steps: int) -> str:
    """Say after which step the run has saved the seconds that compiling `took`."""
    saved = accumulation * sum(gain.times * (gain.eager - gain.compiled) for gain in gains)
    if saved <= 0:
        return "which saves nothing here: --compile off"
    after = math.ceil(took / saved)
    return f"paid back after {after:,} of {steps:,} steps" if after <= steps else "not paid back in this run"


def compile_module(
    module: torch.nn.Module, plan: Plan, grid: ProcessGrid, steps_left: int | None = None
) -> str:
    """Compile `module` in place before DeepSpeed takes it; return a line with the measured gains.

    `steps_left`: of the run, which is left as it is if they cannot pay for compiling; None: it is compiled.

    Collective. The whole model is compiled, or its transformer layers and its loss where other work lies
    between them: in the pipeline, under recomputation, on GPUs that average gradients while earlier layers
    are computed, and under ZeRO-3, which gathers parameters in hooks of each layer. Of a layer `forward`
    alone is compiled, so that the hooks stay outside.
    """
    seed_step(plan.recipe.seed, 0, grid.at)
    started = time.perf_counter()
    if steps_left is not None:
        saved = most_saved(plan, grid, steps_left)
        if saved < USUAL_COST:
            costs = f"it usually takes {USUAL_COST:.0f} s, and could save {saved:.0f} s of this run at most"
            return f"not compiled: {costs}; --compile on does it"
    keep_gcc_from_joining_statements()
    prepare(module, plan)
    if isinstance(module, Stack) and _compiles_whole(plan):
        gains = [Gain("a micro-batch", *_compile_whole(module, plan))]
    else:
        gains = _compile_layers(module, plan, grid)
    took = time.perf_counter() - started
    measured = f"forward and backward of {', '.join(map(str, gains))}; medians of {TIMED}"
    when = payback(gains, took, plan.layout.accumulation, plan.recipe.steps)
    return f"compiled: {measured}; compiling and measuring took {took:.0f} s, {when}"


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
        (found[0] if isinstance(found, tuple) else found).append("fno-tree-slp-vectorize")
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
            attention.prepare(plan.recipe.sequence_length, device, DTYPES[plan.precision])


def _compile_whole(module: Stack, plan: Plan) -> tuple[float, float]:
    """Compile the model; return its eager and compiled seconds of a pass. Gradients are dropped."""
    device = torch.device(get_accelerator().current_device_name())
    module.to(device=device, dtype=DTYPES[plan.precision]).train()
    recipe, model = plan.recipe, plan.recipe.model
    sizes = plan.layout.micro, recipe.sequence_length, recipe.predictions, model.vocab_size
    batch = random_batch(family_of(model).fields, *sizes, model.sequences, model.head_classes)
    given, named = for_plain(batch, device, _salts(plan, device), module.position_ranks)

    def loss() -> torch.Tensor:
        outcome = module(*given, **named)
        return outcome[0] if isinstance(outcome, tuple) else outcome

    eager = seconds_of_pass(loss)
    module.compile()
    compiled = seconds_of_pass(loss)
    module.zero_grad(set_to_none=True)
    return eager, compiled


def _compile_layers(module: torch.nn.Module, plan: Plan, grid: ProcessGrid) -> list[Gain]:
    """Compile every transformer layer and the loss; return the gain of every kind of layer.

    The gain is measured on a separate layer: the model's own may be partitioned, or lie on another stage.
    """
    for layer in module.modules():
        if isinstance(layer, TransformerLayer):
            layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
    if isinstance(module, Stack):
        module.loss = torch.compile(module.loss)
    else:
        last: Any = module.loss_fn
        last.function = torch.compile(last.function)
    kinds, layers = model_shape(plan.recipe, plan.padded_vocab).layer_kinds(), plan.recipe.model.layers
    gains = []
    for shape, count in kinds.items():
        what = (
            f"one {kind_of(shape.window)} layer ({count} of {layers})"
            if len(kinds) > 1
            else "one transformer layer"
        )
        gains.append(Gain(what, *_time_layer(shape, plan, grid), count / plan.layout.pp))
    return gains


def most_saved(plan: Plan, grid: ProcessGrid, steps: int) -> float:
    """Return the most seconds that compiling saves in so many steps: products stay. Collective."""
    own = 0.0  # seconds of a micro-batch
    for shape, count in model_shape(plan.recipe, plan.padded_vocab).layer_kinds().items():
        whole, products = _time_eager(shape, plan, grid)
        own += max(0.0, whole - products) * count / plan.layout.pp
    return steps * plan.layout.accumulation * max(processes.gathered(own, grid.control_group))


def _time_eager(shape: LayerShape, plan: Plan, grid: ProcessGrid) -> tuple[float, float]:
    """Return the seconds of one eager layer, and of its matrix products alone."""
    layer, loss = _random_layer(shape, plan, grid)
    weights = [weight for weight in layer.parameters() if weight.dim() == 2]
    tokens = plan.layout.micro * plan.recipe.model.sequences * plan.recipe.sequence_length
    inputs = [weight.new_empty(tokens, weight.shape[1]).normal_().requires_grad_() for weight in weights]

    def products() -> torch.Tensor:
        return torch.stack([linear(x, w).sum() for x, w in zip(inputs, weights, strict=True)]).sum()

    # Those of scores and values, which attention does besides, at the same rate.
    attention = 1 + plan.recipe.sequence_length / (6 * plan.recipe.model.hidden)
    return seconds_of_pass(lambda: loss(layer), 1, 2), attention * seconds_of_pass(products, 1, 2)


def _time_layer(shape: LayerShape, plan: Plan, grid: ProcessGrid) -> tuple[float, float]:
    """Return eager and compiled seconds of one layer on a random micro-batch."""
    layer, loss = _random_layer(shape, plan, grid)
    compiled = torch.compile(layer)
    return seconds_of_pass(lambda: loss(layer)), seconds_of_pass(lambda: loss(compiled))


def _random_layer(
    shape: LayerShape, plan: Plan, grid: ProcessGrid
) -> tuple[TransformerLayer, Callable[[Callable[..., torch.Tensor]], torch.Tensor]]:
    """Return a layer, and the loss of a form of it on a random micro-batch."""
    recipe = plan.recipe
    device = torch.device(get_accelerator().current_device_name())
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, dtype=DTYPES[plan.precision])
    layer = TransformerLayer(shape, group=grid.tensor_group, init=init).to(device)
    prepare(layer, plan)
    cut_over = shape.positions_group(grid.tensor_group)
    length = recipe.sequence_length // group_size(cut_over)
    size = (plan.layout.micro * recipe.model.sequences, length, recipe.model.hidden)
    x = torch.randn(size, dtype=init.dtype, device=device, requires_grad=True)
    salts = _salts(plan, device)
    salts = None if salts is None else own_positions(salts, cut_over)
    return layer, lambda form: form(x, salts=salts).sum()


def _salts(plan: Plan, device: torch.device) -> torch.Tensor | None:
    """Return salts of hidden dropout for one micro-batch, as in training."""
    recipe = plan.recipe
    samples = torch.arange(plan.layout.micro * recipe.model.sequences, device=device)
    return salts_of(recipe.seed, 0, samples, recipe.sequence_length) if recipe.dropout.hidden else None


def seconds_of_pass(loss: Callable[[], torch.Tensor], warm_up: int = WARM_UP, timed: int = TIMED) -> float:
    """Return the seconds of a forward and backward pass: the median of `timed` ones after a warm-up."""
    times = []
    for _ in range(warm_up + timed):
        get_accelerator().synchronize()
        started = time.perf_counter()
        loss().backward()
        get_accelerator().synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[warm_up:])
