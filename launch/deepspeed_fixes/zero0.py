"""DeepSpeed's plain data parallelism, ZeRO stage 0, is wrong in fp16 and bf16, and clips wrongly in fp32.

Stage 0 is data parallelism as in torch's DistributedDataParallel and in Megatron-LM: every rank holds all
weights and optimizer states, and gradients are averaged over the data-parallel ranks. In fp16 and bf16
DeepSpeed 0.19.8 uses optimizers (`runtime/fp16/fused_optimizer.py`, `unfused_optimizer.py`) that

- step once on zero gradients when they are built: weight decay, at the full learning rate, moves the fp32
  weights away from those of the model, and Adam's bias correction is a step ahead ever after;
- unscale gradients by the fp16 loss scale, though the engine scales the loss for ZeRO's optimizers only;
- in the variant for torch's AdamW count only the first tensor-parallel rank's slices in the gradient norm,
  and report it times the loss scale;
- ignore the hysteresis of the JSON's fp16 section, and do not end at its smallest loss scale;
- increase the loss scale before they unscale by it, which halves that step's gradients.

`MasterWeights` replaces them. Its arithmetic is ZeRO-1's: both stages train alike, except for the rounding of
the norm, and of the last elements of a shard, which torch's fused AdamW computes one by one.

In fp32, `clip_grad_norm_` of `runtime/utils.py` adds up the squares of a whole gradient in float32. On a CPU
torch does this with too few partial sums, and an embedding's norm comes out too small: by a share of 1.6e-4
with 3 million elements, of 2.7e-3 with 39 million. DeepSpeed clips by that norm and drops it; without
clipping it computes none. The other stages add up in float64, and `gradient_norm` differs from them only by
rounding. Upstream: https://github.com/deepspeedai/DeepSpeed/pull/8393 (the unscaled fp16 loss) and
    https://github.com/deepspeedai/DeepSpeed/pull/5104 (the step when they are built), both open;
    https://github.com/pytorch/pytorch/issues/169237 (torch's norm), open too; no issue found for the others.
    Worth another look when
    `test_upstream_symptoms.py::test_stage_0_steps_when_it_is_built`,
    `::test_stage_0_does_not_scale_the_fp16_loss` or `::test_stage_0_adds_up_fp32_gradients_in_float32` fails.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from launch.deepspeed_fixes import versions
from launch.deepspeed_fixes.norms import by_count, divide, divisor_of, sum_of_squares
from modeling.parallel.process_grid import ProcessGrid

AT_ONCE = 2**26  # elements, about, of a list of tensors for one kernel


def initialize(
    *,
    config: dict[str, Any],
    mpu: ProcessGrid,
    torch_ddp: bool = False,
    **arguments: Any,
) -> DataParallelEngine:
    """Replace `deepspeed.initialize` for a plain module; return a `DataParallelEngine`.

    `torch_ddp`: torch's DistributedDataParallel averages the gradients.
    """
    arguments = {
        "optimizer": None,
        **arguments,
        "config_class": DeepSpeedConfig(config, mpu),
    }
    engine = DataParallelEngine(args=None, config=config, mpu=mpu, **arguments)
    if versions.at_least("0.19.8"):
        engine._configure_python_gc()
    if torch_ddp and mpu.get_data_parallel_world_size() > 1:
        torch._dynamo.config.optimize_ddp = False  # it would cut compiled layers
        group = mpu.get_data_parallel_group()
        module = engine.module
        # Weights are alike by their names. Not as a submodule, whose parameters would count twice.
        engine.__dict__["ddp"] = DistributedDataParallel(
            module, process_group=group, init_sync=False, broadcast_buffers=False
        )
    return engine


class DataParallelEngine(DeepSpeedEngine):  # type: ignore[misc]  # has no types
    """DeepSpeed's plain engine at stage 0. In fp16 and bf16 its optimizer is `MasterWeights`.

    `ddp`: averages in the backward pass, of a step's last micro-batch, or of each where sums are in fp32.
    """

    ddp: DistributedDataParallel | None = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.ddp is None or not self.training:
            return super().forward(*inputs, **named)
        module = self.module
        each = getattr(self.optimizer, "sums_in_fp32", False)
        averages = each or self.is_gradient_accumulation_boundary()
        self.__dict__["module"] = self.ddp
        try:
            with contextlib.nullcontext() if averages else self.ddp.no_sync():
                return super().forward(*inputs, **named)
        finally:
            self.__dict__["module"] = module

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the parameters' type also for sums (DeepSpeed calls this); `MasterWeights` has its own."""
        own, _ = super().get_data_types()
        return own, own

    def _configure_fp16_optimizer(
        self, optimizer: Optimizer, low_precision_dtype: torch.dtype
    ) -> MasterWeights:
        """Make the optimizer of both half precisions (DeepSpeed calls this)."""
        scaler = CreateLossScaler(
            low_precision_dtype,
            self.loss_scale(),
            self.dynamic_loss_scale(),
            self.dynamic_loss_scale_args(),
        )
        skips = (
            low_precision_dtype == torch.float16
            or self._config.bfloat16_config.check_grad_overflow
        )
        return MasterWeights(
            optimizer,
            self.mpu,
            clip=self.gradient_clipping(),
            scaler=scaler,
            skips_overflow=skips,
            sums_in_fp32=super().get_data_types()[1] == torch.float32,
        )

    def backward(self, loss: torch.Tensor, **how: Any) -> Any:
        if self.fp16_enabled():
            loss = loss * self.optimizer.cur_scale
        return super().backward(loss, **how)

    def allreduce_gradients(self, *how: Any, **more: Any) -> None:
        """Add up gradients after each backward pass; average after a step's last (DeepSpeed calls this)."""
        if getattr(self.optimizer, "sums_in_fp32", False):
            self.optimizer.take_gradients()
        if self.mpu.get_data_parallel_world_size() > 1 and self.ddp is None:
            super().allreduce_gradients(*how, **more)

    def _take_model_step(self, *how: Any) -> None:
        """Compute the norm in fp32, then step: gradients are averaged by now (DeepSpeed calls this)."""
        if not (self.fp16_enabled() or self.bfloat16_enabled()):
            self._global_grad_norm = gradient_norm(self.module.parameters(), self.mpu)
        super()._take_model_step(*how)

    def clip_fp32_gradients(self) -> None:
        """Clip the gradients in a step (DeepSpeed calls this if the JSON clips)."""
        factor = torch.clamp(
            self.gradient_clipping() / (self._global_grad_norm + 1e-6), max=1.0
        )
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def gradient_norm(
    parameters: Iterable[torch.nn.Parameter],
    mpu: ProcessGrid,
    gradients: Iterable[torch.Tensor | None] = (),
) -> torch.Tensor:
    """Return the L2 norm of a whole model's gradient, an fp32 scalar; `parameters`: this rank's.

    `gradients`: the gradients, if the parameters do not hold them. Collective over the tensor-parallel ranks.
    The norm is not finite if a gradient is not.
    """
    parameters = list(parameters)
    held = list(gradients) or [parameter.grad for parameter in parameters]
    pairs = zip(parameters, held, strict=True)
    total = sum_of_squares(*by_count(pairs, mpu.get_model_parallel_rank()))
    if mpu.get_model_parallel_world_size() > 1:
        dist.all_reduce(total, group=mpu.get_model_parallel_group())
    return total.sqrt().float()


class MasterWeights(DeepSpeedOptimizer):  # type: ignore[misc]  # has no types
    """An optimizer that steps fp32 copies of all fp16 or bf16 parameters and rounds them back.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3. Gradients are averaged over the
    data-parallel ranks in the parameters' precision, or summed over micro-batches and ranks in fp32. A
    parameter takes 16 bytes between backward and step: 2 of weight, 2 of gradient (fp32: 4, and 2 until they
    are added), 12 of fp32 weight and moments. In a step it takes 18, since all gradients are in fp32 until
    the optimizer has stepped. Kernels take lists of tensors of `AT_ONCE` elements, so that few gradients
    exist in both precisions at once.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mpu: ProcessGrid,
        *,
        clip: float,
        scaler: Any,
        skips_overflow: bool,
        sums_in_fp32: bool = False,
    ):
        """Take over a new `optimizer`; `clip`: largest norm, 0: none; `scaler`: DeepSpeed's loss scaler."""
        self.sums_in_fp32 = sums_in_fp32
        self.optimizer = optimizer
        self.mpu = mpu
        self.clip = clip
        self.loss_scaler = scaler
        self.skips_overflow = skips_overflow
        self.overflow = False
        self._global_grad_norm = 0.0
        self.pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for group in optimizer.param_groups:
            masters = [p.detach().to(torch.float32, copy=True) for p in group["params"]]
            self.pairs += zip(group["params"], masters, strict=True)
            group["params"] = masters
        self.lists = list(_lists(self.pairs))

    @property
    def cur_scale(self) -> float:
        scale: float = self.loss_scaler.cur_scale
        return scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return self.optimizer.state

    def _update_scale(self, has_overflow: bool = False) -> None:
        self.loss_scaler.update_scale(has_overflow)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the parameters' gradients to their masters in fp32, or add them there."""
        for parameters, masters in self.lists:
            first = masters[0].grad is None
            add_up: Any = torch._foreach_copy_ if first else torch._foreach_add_
            sums: list[Any] = []
            gradients = []
            for parameter, master in zip(parameters, masters, strict=True):
                used = parameter.grad is not None  # in this step
                if first:
                    make = torch.empty_like if used else torch.zeros_like
                    master.grad = make(master)
                if used:
                    sums.append(master.grad)
                    gradients.append(parameter.grad)
                    parameter.grad = None
            if sums:
                add_up(sums, gradients)

    def get_grads_for_reduction(
        self,
    ) -> tuple[list[torch.Tensor | None], dict[str, Any]]:
        """Return the gradients to average over the data-parallel ranks (DeepSpeed calls this)."""
        return [
            (master if self.sums_in_fp32 else parameter).grad
            for parameter, master in self.pairs
        ], {}

    @torch.no_grad()
    def step(self) -> None:
        """Unscale, clip, step and round; if a gradient is not finite, skip the step on all ranks."""
        gradients: Any = self.get_grads_for_reduction()[0]
        parameters = (parameter for parameter, _ in self.pairs)
        scaled_norm = gradient_norm(parameters, self.mpu, gradients).item()
        self.overflow = self.skips_overflow and not math.isfinite(scaled_norm)
        if self.overflow:
            self._global_grad_norm = math.inf
            self._update_scale(True)
            self.zero_grad()
            return
        self._global_grad_norm = scaled_norm / self.cur_scale
        if not self.sums_in_fp32:
            self.take_gradients()
        gradients = [master.grad for _, master in self.pairs]
        divide(
            self.optimizer,
            gradients,
            divisor_of(scaled_norm, self.cur_scale, self.clip),
        )
        self.optimizer.step()
        for _, master in self.pairs:
            master.grad = None
        self.round_weights()
        self._update_scale(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter, master in self.pairs:
            parameter.grad = master.grad = None

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round the master weights into the model's weights."""
        for parameters, masters in self.lists:
            torch._foreach_copy_([*parameters], masters)

    def destroy(self) -> None:
        """Release the weights (DeepSpeed calls this)."""
        self.pairs = []
        self.lists = []


def _lists(
    pairs: Sequence[tuple[torch.nn.Parameter, torch.Tensor]],
) -> Iterator[tuple[list[torch.nn.Parameter], list[torch.Tensor]]]:
    """Group the pairs into (parameters, masters), each list of `AT_ONCE` elements or little more."""
    ends = itertools.accumulate(master.numel() for _, master in pairs)
    for _, group in itertools.groupby(
        zip(pairs, ends, strict=True), lambda each: each[1] // AT_ONCE
    ):
        several = [pair for pair, _ in group]
        yield [parameter for parameter, _ in several], [master for _, master in several]
