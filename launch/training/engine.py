"""The DeepSpeed engine of a resolved plan, and one training or validation step on it.

No other module knows whether the engine is plain (ZeRO 0-3, with or without tensor parallelism) or a
pipeline.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.partition_parameters import (
    InsertPostInitMethodToModuleSubClasses,
)
from torch.nn import functional as F

from data.loader import MicroBatch
from ds_configs.plan import Plan
from launch.deepspeed_fixes import versions
from launch.deepspeed_fixes.muon_compilation import leave_out_compilation
from launch.deepspeed_fixes.short_steps import shorten_step
from launch.machine import compiled_ops, memory
from launch.ranks import processes
from launch.records.facts import StepRecord, Validation, finite
from launch.training import micro_batches
from launch.training.build_model import build_module
from launch.training.early_ends import Diverged
from launch.training.job import Job
from launch.training.schedule import LearningRateSchedule
from modeling.parallel.process_grid import ProcessGrid

# (engine, micro-batch) -> (loss) or (loss, parts of it)
Forward = Callable[..., tuple[torch.Tensor, ...]]


def parameter_groups(
    module: torch.nn.Module, weight_decay: float
) -> list[dict[str, Any]]:
    """Return two groups: matrices and embeddings with weight decay, biases and LayerNorms without."""
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": each} for each in (weight_decay, 0.0)
    ]
    for parameter in module.parameters():
        # ZeRO-3 leaves an empty tensor behind
        shape = getattr(parameter, "ds_shape", parameter.shape)
        groups[len(shape) <= 1]["params"].append(parameter)
    return [g for g in groups if g["params"]]


def build_engine(
    job: Job, grid: ProcessGrid, say: compiled_ops.Say, *, resumed: bool = False
) -> DeepSpeedEngine:
    """Build a DeepSpeed engine for the job; `say` announces ops that are compiled first. Collective.

    `resumed`: a checkpoint will give the weights, and none are drawn.
    """
    plan = job.plan
    device = processes.device()
    if plan.offload != "none" and device.own_memory:
        memory.pin_no_more_than_asked()
    compiled_ops.prepare(plan.ds, grid.control_group, say)
    leave_out_compilation()
    # Not left to DeepSpeed: the tracker of dropout states has to know the tensor group before a draw.
    deepspeed.checkpointing.configure(grid, deepspeed_config=plan.ds)
    weights = job.initial_weights
    given = weights.read(plan.recipe) if weights and not resumed else None
    module = build_module(plan, grid, given, drawn=not resumed)
    if job.compiled:
        from launch.training import compiling

        say(compiling.compile_module(module, plan))
    engine = initialize(plan, module, grid)
    if device.own_memory:
        # of parameters, before they became parts of a buffer
        memory.return_unused_pinned()
    move_buffers(module, engine.device)
    if engine.fp16_enabled():
        from launch.deepspeed_fixes.loss_scale import postpone_growth

        postpone_growth(engine)
    if device.asynchronous:
        from launch.deepspeed_fixes.freed_gradients import keep_while_reduced

        keep_while_reduced(engine.optimizer)
    setting = shorten_step(engine)
    if setting:
        say(f"{setting}: DeepSpeed's own step, with its copies of the gradients")
    return engine


def initialize(
    plan: Plan, module: torch.nn.Module, grid: ProcessGrid
) -> DeepSpeedEngine:
    """Make DeepSpeed's engine of a module, ours or another, with our groups of parameters and schedule."""
    own = own_optimizer(plan, grid)
    config = plan.ds
    if own:
        # Asked for by ZeRO where it does not know the optimizer's class.
        config = {**config, "zero_allow_untested_optimizer": True}
    by_muon = plan.recipe.optimizer.name == "muon"
    if by_muon:
        # DeepSpeed would mark parameters for its own Muon.
        del config["optimizer"]
    how: dict[str, Any] = {
        "model": module,
        "model_parameters": parameter_groups(
            module, plan.recipe.optimizer.weight_decay
        ),
        "mpu": None if isinstance(module, PipelineModule) else grid,
        "config": config,
        "optimizer": own,
        "lr_scheduler": lambda optimizer: LearningRateSchedule(optimizer, plan.recipe),
    }
    if plan.zero_stage == 0:
        from launch.deepspeed_fixes import zero0

        engine = zero0.initialize(**how, torch_ddp=plan.recipe.parallel.torch_ddp)
    else:
        if not versions.at_least("0.19.0"):
            from launch.deepspeed_fixes.flat_weights import leave_out_of_graph

            leave_out_of_graph()
        engine = deepspeed.initialize(**how)[0]
    if by_muon:
        from launch.checkpoints.engine_state import EngineState

        engine.basic_optimizer.locate(EngineState(engine, grid).partitions)
    return engine


def own_optimizer(
    plan: Plan, grid: ProcessGrid
) -> Callable[..., torch.optim.Optimizer] | None:
    """Return what makes our LAMB, Muon, or Adam without bias correction, of groups of parameters.

    None: DeepSpeed makes AdamW.
    """
    optimizer = plan.ds["optimizer"]
    params = dict(optimizer["params"])
    torch_adam = params.pop("torch_adam", False)
    if optimizer["type"].lower() == "muon":
        from launch.deepspeed_fixes.muon import Muon

        dtype = torch.float32 if plan.precision == "fp32" else torch.bfloat16
        heads = plan.recipe.model.heads
        return functools.partial(Muon, grid=grid, heads=heads, dtype=dtype, **params)
    if optimizer["type"].lower() == "lamb":
        from launch.deepspeed_fixes.lamb import Lamb

        return functools.partial(Lamb, grid=grid, **params)
    if not torch_adam or params.get("bias_correction", True):
        return None
    from launch.deepspeed_fixes.lamb import Adam

    return functools.partial(Adam, **params)


def move_buffers(module: torch.nn.Module, device: torch.device) -> None:
    """Move all buffers to the device of the parameters: DeepSpeed's zero.Init moves parameters alone."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)


@contextlib.contextmanager
def release_at_end(engine: DeepSpeedEngine) -> Iterator[None]:
    """Release the engine in the end, so that the next run in this process starts clean."""
    try:
        yield
    finally:
        engine.destroy()
        deepspeed.checkpointing.reset()
        # zero.Init leaves its own, which rounds otherwise, to every later model.
        F.linear = getattr(
            InsertPostInitMethodToModuleSubClasses, "linear_bk", F.linear
        )
        # graphs of this model count against the limit of the next one
        torch._dynamo.reset()


def train_step(
    engine: DeepSpeedEngine,
    batches: Sequence[MicroBatch],
    grid: ProcessGrid,
    dropout_seeds: Sequence[torch.Tensor | None],
) -> Callable[[], StepRecord]:
    """Make one optimizer step over this data-parallel rank's micro-batches; a GPU may still compute it.

    Return what reads its outcome (`read_outcome`).

    `dropout_seeds`: of each micro-batch, by `micro_batches.dropout_seeds_of_step`.
    DeepSpeed divides each loss by the accumulation steps, averages gradients over data-parallel ranks, clips,
    scales and unscales, and steps the optimizer and the schedule at the last micro-batch.
    """
    before = state_before_step(engine)
    engine.set_train_batch_size(
        len(batches) * engine.train_micro_batch_size_per_gpu() * grid.dp
    )
    micro_batches.move_unpadded(batches, engine.device)
    batches = micro_batches.normalise(batches, grid, engine.device)
    with explain_floor(engine):
        if isinstance(engine, PipelineEngine):
            from launch.deepspeed_fixes.train_batch_timer import forget_batches

            loss = engine.train_batch(pipeline_batches(engine, batches, dropout_seeds))
            forget_batches(engine)
            figures = HostCopy(_pipeline_figures(engine, loss, grid))
        else:
            losses = list[torch.Tensor]()
            engine.train()
            for batch, dropout_seed in zip(batches, dropout_seeds, strict=True):
                # Else DeepSpeed goes by the micro-batches of all steps, whose number per step may change.
                engine.set_gradient_accumulation_boundary(
                    len(losses) + 1 == len(batches)
                )
                loss, *parts = forward(engine, batch, dropout_seed)
                engine.backward(loss)
                losses.append(torch.cat([loss.detach().float().view(1), *parts]))
                if len(losses) == len(batches):
                    # Before the step, which waits for the norm: these numbers are there by then.
                    figures = HostCopy(
                        data_parallel_mean(torch.stack(losses).mean(0), grid)
                    )
                engine.step()
    return functools.partial(read_outcome, engine, before, figures)


def pipeline_batches(
    engine: PipelineEngine,
    batches: Sequence[MicroBatch],
    dropout_seeds: Sequence[torch.Tensor | None],
) -> Iterator[Any]:
    """Return what the first and the last stage take; give this one, any, the documents' rows."""
    # Not made lazily with these: stages between the first and the last take none.
    engine.module.rows = micro_batches.rows_of_documents(batches, engine.device)
    device = itertools.repeat(engine.device)
    return map(micro_batches.for_pipeline, batches, dropout_seeds, device)


class HostCopy:
    """Scalars on their way to the host, which waits for them only where it reads them too early."""

    def __init__(self, values: torch.Tensor) -> None:
        """Begin to copy `values` (N)."""
        self._values = values
        self._copied = None
        if processes.device().own_memory:
            self._values = values.to("cpu", non_blocking=True)  # into pinned memory
            self._copied = get_accelerator().Event()
            self._copied.record()

    def read(self) -> list[float]:
        """Return the scalars."""
        if self._copied is not None and not self._copied.query():
            self._copied.synchronize()
        return self._values.tolist()


# before an optimizer step: learning rate, loss scale, skipped steps so far
State = tuple[float, float, int]


def state_before_step(engine: DeepSpeedEngine) -> State:
    return engine.get_lr()[0], loss_scale(engine), engine.skipped_steps


def read_outcome(
    engine: DeepSpeedEngine, before: State, figures: HostCopy
) -> StepRecord:
    """Read the figures of the step that the engine has made, without its times. Raises Diverged."""
    lr, scale, skipped_steps = before
    if engine.fp16_enabled():
        engine.settle_loss_scale()
    norm = engine.get_global_grad_norm()
    skipped = engine.skipped_steps > skipped_steps
    # DeepSpeed skips in bf16 and fp32 too
    overflowed = skipped and engine.fp16_enabled()
    mean, *parts = figures.read()
    if not math.isfinite(mean) and not overflowed:
        precision = "bf16" if engine.bfloat16_enabled() else "fp32"
        if engine.fp16_enabled():
            precision = "fp16"
        raise Diverged(f"the loss is {mean} in {precision}")
    named = {}
    for name, value in _name_parts(engine, parts).items():
        named[name] = finite(value)
    return StepRecord(
        step=engine.global_steps,
        loss=finite(mean),
        skipped=bool(skipped),
        lr=lr,
        grad_norm=None if norm is None else finite(float(norm)),
        loss_scale=finite(scale),
        parts=named,
    )


def forward(
    engine: DeepSpeedEngine,
    batch: MicroBatch,
    dropout_seeds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return (loss) or (loss, parts of it) of one micro-batch by our plain model."""
    given, named = micro_batches.for_plain(
        batch, engine.device, dropout_seeds, engine.module.position_ranks
    )
    result = engine(*given, **named)
    return result if isinstance(result, tuple) else (result,)


@torch.no_grad()
def validate(
    engine: DeepSpeedEngine,
    steps: Sequence[Sequence[MicroBatch]],
    grid: ProcessGrid,
    forward: Forward,
) -> Validation:
    """Return mean losses over held-out samples; batch weights make the means exact. Collective."""
    totals = []
    for batches in micro_batches.normalise_steps(steps, grid, engine.device):
        if isinstance(engine, PipelineEngine):
            unused = [_unused_dropout_seeds(engine, batch) for batch in batches]
            pairs = pipeline_batches(engine, batches, unused)
            loss = engine.eval_batch(pairs, num_micro_batches=len(batches))
            totals.append(_pipeline_figures(engine, loss, grid))
        else:
            engine.eval()
            losses = []
            for batch in batches:
                loss, *parts = forward(engine, batch)
                losses.append(torch.cat([loss.float().view(1), *parts]))
            totals.append(data_parallel_mean(torch.stack(losses).mean(0), grid))
    engine.train()
    mean, *means = torch.stack(totals).mean(0).tolist()
    return Validation(mean, _name_parts(engine, means))


@contextlib.contextmanager
def other_shape(engine: DeepSpeedEngine) -> Iterator[None]:
    """Have stages of a pipeline, which agree on one shape, exchange another one during the block."""
    if not isinstance(engine, PipelineEngine):
        yield
        return
    engine.reset_activation_shape()
    try:
        yield
    finally:
        engine.reset_activation_shape()


def _unused_dropout_seeds(
    engine: PipelineEngine, batch: MicroBatch
) -> torch.Tensor | None:
    """Return stand-ins for seeds in a validation: pipeline stages agree on shapes only once."""
    size = (*batch["tokens"].shape, 2)
    return (
        torch.zeros(size, dtype=torch.int64, device=engine.device)
        if engine.module.takes_dropout_seeds
        else None
    )


def _pipeline_figures(
    engine: PipelineEngine, loss: torch.Tensor, grid: ProcessGrid
) -> torch.Tensor:
    """Return the loss and the means of its parts since the last call, on every stage. Collective."""
    loss_fn = engine.module.loss_fn
    mean = loss.float().view(1)
    if not loss_fn.part_names:
        return mean.clone()
    taken = loss_fn.take_parts()
    if taken is None:
        parts = torch.zeros(len(loss_fn.part_names), device=engine.device)
    else:
        parts = data_parallel_mean(taken.mean(0).float(), grid)
    # The last stage alone has them: a sum over the stages gives them to all.
    dist.all_reduce(parts, group=grid.pipeline_group)
    return torch.cat([mean, parts])


def _name_parts(engine: DeepSpeedEngine, parts: Sequence[float]) -> dict[str, float]:
    if not parts:
        return {}
    return dict(zip(engine.module.loss_parts, parts, strict=True))


def loss_scale(engine: DeepSpeedEngine) -> float:
    """Return the fp16 loss scale of the next step; 1 in other precisions."""
    return float(engine._get_optimizer_loss_scale()) if engine.fp16_enabled() else 1.0


def data_parallel_mean(x: torch.Tensor, grid: ProcessGrid) -> torch.Tensor:
    if grid.dp > 1:
        dist.all_reduce(x, group=grid.data_group)
        x = x / grid.dp
    return x


@contextlib.contextmanager
def explain_floor(engine: DeepSpeedEngine) -> Iterator[None]:
    """Turn DeepSpeed's error on overflow at the smallest loss scale into Diverged."""
    try:
        yield
    except Exception as e:
        from launch.deepspeed_fixes.loss_scale import is_at_floor

        if not is_at_floor(e):
            raise
        raise Diverged(
            f"gradients overflow at the smallest allowed loss scale, {loss_scale(engine):g} "
            "(fp16.min_loss_scale): fp16 cannot represent them, and every further step would be skipped"
        ) from None
