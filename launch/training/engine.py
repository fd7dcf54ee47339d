"""From a resolved plan to a DeepSpeed engine, and one training or validation step on it.

The only place that knows whether the engine is plain (ZeRO 0-3, with or without tensor parallelism) or a pipeline.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import set_z3_leaf_modules

from ds_configs.plan import Plan
from launch.deepspeed_fixes import zero0
from launch.deepspeed_fixes.loss_scale_growth import postpone_growth
from launch.machine import compiled_ops
from launch.training import compiling, micro_batches
from launch.training.build_model import build_module
from launch.training.micro_batches import MicroBatch
from launch.training.schedule import Schedule
from modeling.parallel.process_grid import ProcessGrid
from modeling.transformer import TransformerLayer

Forward = Callable[..., tuple[torch.Tensor, ...]]  # (engine, micro-batch) -> (loss) or (loss, parts of it)
STUCK_STEPS = 20  # skipped steps in a row after which a static loss scale counts as stuck


class Diverged(RuntimeError):
    """Further steps would be noise: the loss is not finite, or the fp16 loss scale is stuck. The message says what to do."""


@dataclass(frozen=True)
class Step:
    """What one optimizer step reports; losses are means over the global batch, in nats per token (sentence loss: per sample)."""

    loss: float
    lr: float
    grad_norm: float | None
    loss_scale: float
    skipped: bool
    parts: dict[str, float] = field(default_factory=dict)  # of the loss, as the family names them


@dataclass(frozen=True)
class Validation:
    """Means over the held-out samples, as in `Step`."""

    loss: float
    parts: dict[str, float] = field(default_factory=dict)


def parameter_groups(module: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: matrices and embeddings, which are decayed, and biases and LayerNorms, which are not."""
    decayed, plain = [], []
    for parameter in module.parameters():
        dimensions = len(
            getattr(parameter, "ds_shape", parameter.shape)
        )  # ZeRO-3 leaves an empty tensor behind
        (decayed if dimensions > 1 else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def build_engine(
    plan: Plan,
    grid: ProcessGrid,
    *,
    compiled: bool = False,
    initial_weights: str | None = None,
    say: compiled_ops.Say = print,
):
    """A DeepSpeed engine for `plan` on the processes of `grid`; `say` is told when an op has to be compiled first."""
    compiled_ops.prepare(plan.ds, grid.control_group, say)
    # Here and not by DeepSpeed, so that the tracker of dropout states knows the tensor group before anything is drawn.
    deepspeed.checkpointing.configure(grid, deepspeed_config=plan.ds)
    module = build_module(plan, grid, initial_weights)
    if plan.zero_stage == 3:
        # Gather a layer's parameters at once: one set of hooks for each layer instead of one for each of its leaves.
        set_z3_leaf_modules(module, [TransformerLayer])
    if compiled:
        say(compiling.compile_module(module, plan, grid))
    how = {
        "model": module,
        "model_parameters": parameter_groups(module, plan.recipe.optimizer.weight_decay),
        "mpu": None if isinstance(module, PipelineModule) else grid,
        "config": plan.ds,
        "lr_scheduler": lambda optimizer: Schedule(optimizer, plan.recipe),
    }
    engine = zero0.initialize(**how) if plan.zero_stage == 0 else deepspeed.initialize(**how)[0]
    if engine.fp16_enabled():
        postpone_growth(engine)
    return engine


@contextlib.contextmanager
def closing(engine):
    """Release what the engine holds, so that the next run in this process starts clean."""
    try:
        yield
    finally:
        engine.destroy()
        deepspeed.checkpointing.reset()
        torch._dynamo.reset()  # compiled code of this model counts against the recompilation limit of the next


def train_step(engine, batches: Sequence[MicroBatch], grid: ProcessGrid) -> Step:
    """One optimizer step over the micro-batches of this data-parallel rank.

    DeepSpeed divides each loss by the accumulation steps, averages gradients over data-parallel ranks, clips, scales and
    unscales, and steps the optimizer and the schedule at the last micro-batch.
    """
    before = Before.step(engine)
    batches = micro_batches.normalised(batches, grid, engine.device)
    with explained_floor(engine):
        if isinstance(engine, PipelineEngine):
            loss = engine.train_batch(iter([micro_batches.for_pipeline(b) for b in batches]))
            parts = _pipeline_parts(engine, grid)
        else:
            engine.train()
            outcomes = []
            for batch in batches:
                loss, *parts = forward(engine, batch)
                engine.backward(loss)
                engine.step()
                outcomes.append(torch.cat([loss.detach().float().view(1), *parts]))
            loss, *parts = data_parallel_mean(torch.stack(outcomes).mean(0), grid)
    return outcome_of_step(engine, before, loss, parts)


@dataclass(frozen=True)
class Before:
    """Of an engine before an optimizer step."""

    lr: float
    loss_scale: float
    skipped_steps: int

    @staticmethod
    def step(engine) -> Before:
        return Before(engine.get_lr()[0], loss_scale(engine), engine.skipped_steps)


def outcome_of_step(engine, before: Before, loss: torch.Tensor, parts: Sequence[torch.Tensor] = ()) -> Step:
    """What the step that began at `before` reports, with its mean `loss`. Raises Diverged where the loss is lost."""
    if engine.fp16_enabled():
        engine.settle_loss_scale()
    norm = engine.get_global_grad_norm()
    skipped = engine.skipped_steps > before.skipped_steps
    if not math.isfinite(float(loss)) and not (
        skipped and engine.fp16_enabled()
    ):  # DeepSpeed skips in bf16 and fp32 too
        raise Diverged(f"the loss is {float(loss)} in {engine_precision(engine)}. {DIVERGED_ADVICE}")
    return Step(
        float(loss),
        before.lr,
        None if norm is None else float(norm),
        before.loss_scale,
        skipped,
        _named(engine, parts),
    )


def forward(engine, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
    """(loss) or (loss, parts of it) of one micro-batch, by our plain model."""
    outcome = engine(*micro_batches.for_plain(batch, engine.device))
    return outcome if isinstance(outcome, tuple) else (outcome,)


@torch.no_grad()
def validate(
    engine, steps: Sequence[Sequence[MicroBatch]], grid: ProcessGrid, forward: Forward = forward
) -> Validation:
    """Mean losses over the held-out samples; weights of the batches make the mean over micro-batches exact."""
    steps = micro_batches.normalised_steps(steps, grid, engine.device)
    totals = []
    for batches in steps:
        if isinstance(engine, PipelineEngine):
            loss = engine.eval_batch(
                iter([micro_batches.for_pipeline(b) for b in batches]), num_micro_batches=len(batches)
            )
            totals.append(torch.stack([loss.float().squeeze(), *_pipeline_parts(engine, grid)]))
        else:
            engine.eval()
            outcomes = [
                torch.cat([loss.float().view(1), *parts])
                for loss, *parts in (forward(engine, b) for b in batches)
            ]
            totals.append(data_parallel_mean(torch.stack(outcomes).mean(0), grid))
    engine.train()
    loss, *parts = torch.stack(totals).mean(0)
    return Validation(float(loss), _named(engine, parts))


def _pipeline_parts(engine, grid: ProcessGrid) -> list[torch.Tensor]:
    """Means of the parts of the loss over the micro-batches since the last call, on every stage. Collective; [] for GPT-2."""
    loss_fn = engine.module.loss_fn
    if not loss_fn.part_names:
        return []
    taken = loss_fn.take_parts()
    parts = (
        torch.zeros(len(loss_fn.part_names), device=engine.device) if taken is None else taken.mean(0).float()
    )
    if taken is not None:
        parts = data_parallel_mean(parts, grid)
    # From the last stage, which alone has them, to the others: the sum over the stages.
    dist.all_reduce(parts, group=grid.pipeline_group)
    return list(parts)


def _named(engine, parts: Sequence[torch.Tensor]) -> dict[str, float]:
    names = engine.module.loss_parts if parts else ()
    return {name: float(value) for name, value in zip(names, parts, strict=True)}


def loss_scale(engine) -> float:
    """The fp16 loss scale that the next step will use; 1 in other precisions."""
    return float(engine._get_optimizer_loss_scale()) if engine.fp16_enabled() else 1.0


def data_parallel_mean(x: torch.Tensor, grid: ProcessGrid) -> torch.Tensor:
    if grid.dp > 1:
        dist.all_reduce(x, group=grid.data_group)
        x = x / grid.dp
    return x


@contextlib.contextmanager
def explained_floor(engine):
    """DeepSpeed raises a bare Exception when an overflow meets the smallest loss scale: say what it means and what to do."""
    try:
        yield
    except Exception as e:
        if "loss scale already at minimum" not in str(e):
            raise
        raise Diverged(
            f"gradients overflow at the smallest allowed loss scale, {loss_scale(engine):g} (fp16.min_loss_scale): fp16 cannot "
            f"represent them, and every further step would be skipped. {DIVERGED_ADVICE}"
        ) from None


class SkippedInARow:
    """Watches for skipped steps that nothing will end: a static loss scale that overflows, or bf16 gradients that are not finite.

    A dynamic loss scale comes down, and DeepSpeed itself watches its floor.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.count = 0
        self.scale = math.nan

    def see(self, report: Step) -> None:
        """Raises Diverged after STUCK_STEPS skipped steps in a row at one loss scale."""
        self.count = (
            self.count + 1 if report.skipped and report.loss_scale == self.scale else int(report.skipped)
        )
        self.scale = report.loss_scale
        if self.count < STUCK_STEPS:
            return
        if self.precision != "fp16":
            raise Diverged(
                f"the gradients of {self.count} steps in a row were not finite in {self.precision}. {DIVERGED_ADVICE}"
            )
        raise Diverged(
            f"{self.count} steps in a row overflowed and were skipped at loss scale {report.loss_scale:g}: the scale does not "
            f"come down to what fp16 can represent (fp16.loss_scale fixes it; 0 makes it dynamic). {DIVERGED_ADVICE}"
        )


DIVERGED_ADVICE = """Nothing more can be learned from here.
  - metrics.jsonl shows the grad norm before this step: if it grew, lower optimizer.lr, lengthen schedule.warmup_steps or
    set optimizer.clip
  - fp16 overflows where bf16, which needs no loss scale, does not: ds_configs/bf16.json or --set precision=bf16
  - --resume goes on from the last checkpoint"""


def engine_precision(engine) -> str:
    return "fp16" if engine.fp16_enabled() else "bf16" if engine.bfloat16_enabled() else "fp32"
