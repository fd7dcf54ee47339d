"""DeepSpeed's ZeRO 1 to 3 pass over the gradients more often than their arithmetic needs.

DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, copies each gradient into a bucket, from there into a
buffer of its partition, from there into one flat tensor, and that one into fp32; looks at every element for
infinities, twelve kernels a tensor, and then computes the norm, which tells the same; multiplies by the
clipping factor before the optimizer reads the gradients again; and on one data-parallel rank averages,
reduces and gathers over a group of one. With an offloaded optimizer it waits for the device at every
gradient, and again at every norm. `stage3.py` looks at all gradients twice more in fp16.

These classes keep its layout of weights and states, its hooks, buckets and collectives. Under `FlatStep` a
gradient, reduced where there is more than one data-parallel rank, goes once into the partition's flat fp32
gradient; torch's fused AdamW takes the factor along. In all of them an overflow is a norm that is not
finite. What they lack is left to DeepSpeed's own way, and `shorten_step` says which setting it was.

Rounding differs from DeepSpeed's: of the norm, and of gradients divided in the kernel. Upstream: no issue
found. `test_short_steps.py::test_deepspeed_has_what_the_short_steps_replace` fails when what they override
changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype

from launch.deepspeed_fixes.norms import counts_here, divide, divisor_of, sum_of_squares


class Place(NamedTuple):
    """Elements [first, first + elements) of a gradient, which lie at `offset` in the partition."""

    first: int
    offset: int
    elements: int


def shorten_step(engine: DeepSpeedEngine) -> str | None:
    """Have the engine's optimizer step the short way; return the setting that stands against it, or None."""
    optimizer = engine.optimizer
    if type(optimizer) is DeepSpeedZeroOptimizer:
        if setting := _obstacle(optimizer):
            return setting
        if optimizer.cpu_offload:
            optimizer.__class__ = OffloadedStep
        else:
            optimizer.__class__ = FlatStep
            optimizer.begin()
    elif type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        if optimizer.use_muon or optimizer.zenflow:
            return "zero_optimization.zenflow" if optimizer.zenflow else "optimizer.type=Muon"
        optimizer.__class__ = ShardedStep
    return None


def _obstacle(optimizer: DeepSpeedZeroOptimizer) -> str | None:
    """Return the setting of the JSON that the short way lacks, or None."""
    flat = not optimizer.cpu_offload
    reasons = {
        "zero_optimization.zenflow": optimizer.zenflow,
        "zero_optimization.contiguous_gradients=false": not optimizer.contiguous_gradients,
        "zero_optimization.round_robin_gradients": optimizer.round_robin_gradients,
        "zero_optimization.parameter_alignment": optimizer.parameter_alignment,
        "zero_optimization.compute_grad_norm=false": not optimizer.compute_grad_norm,
        "data_types.grad_accum_dtype": flat and optimizer.use_grad_accum_attribute,
        "mixture of experts": optimizer.has_moe_layers
        or any(is_moe_param(p) for group in optimizer.bit16_groups for p in group),
        "torch_autocast": optimizer.torch_autocast_gradscaler is not None,
        "optimizer.type=Muon": "muon" in type(optimizer.optimizer).__name__.lower(),
    }
    return next((setting for setting, stands in reasons.items() if stands), None)


class FlatStep(DeepSpeedZeroOptimizer):
    """ZeRO 1 and 2 with one copy of each gradient, one norm, and nothing over a group of one."""

    def begin(self) -> None:
        """Find the place of each gradient in the partition, once the optimizer is built."""
        self._alone = dist.get_world_size(self.dp_process_group) == 1
        self._taken: set[int] = set()  # parameters with a gradient in this step
        self._places = [self._find_places(group) for group in range(len(self.bit16_groups))]
        # Runs of neighbouring places, those that count in the norm and the others.
        groups = range(len(self._places))
        self._runs = [[list(self._find_runs(group, counts)) for group in groups] for counts in (True, False)]

    def _find_places(self, group: int) -> dict[int, Place]:
        """Return the place of each parameter, by its number, that lies in this rank's partition."""
        own = dist.get_rank(self.real_dp_process_group[group])
        offsets, size = self.grad_partition_insertion_offset[group][own], int(self.partition_size[group])
        places = {}
        for number, first in self.grad_start_offset[group][own].items():
            elements = min(self.param_dict[number].numel() - first, size - offsets[number])
            places[number] = Place(int(first), int(offsets[number]), int(elements))
        return places

    def _find_runs(self, group: int, counts: bool) -> Iterator[tuple[int, int]]:
        """Yield start and end of neighbouring places whose elements count in the norm, or do not."""
        start = end = 0
        for number, (_, offset, elements) in self._places[group].items():
            if counts_here(self.param_dict[number], self.model_parallel_rank) != counts:
                continue
            if offset != end:
                if end > start:
                    yield start, end
                start = offset
            end = offset + elements
        if end > start:
            yield start, end

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Say whether reduced gradients go to DeepSpeed's own fp32 sums (DeepSpeed calls this)."""
        return not getattr(self, "_alone", False) and super()._use_compact_grad_partition_buffer(group_idx)

    def setup_buckets(self) -> None:
        """Make buckets where gradients are reduced (DeepSpeed calls this)."""
        if not self._alone:
            super().setup_buckets()

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: torch.nn.Parameter, i: int) -> None:
        """Take the gradient at once on a single rank (DeepSpeed calls this when it is whole)."""
        if not self._alone:
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        elif getattr(param, "ds_grad_is_ready", True):
            self.copy_grads_in_partition(param, i)

    @torch.no_grad()
    def copy_grads_in_partition(self, param: torch.nn.Parameter, group_idx: int | None = None) -> None:
        """Move a reduced gradient into the partition's, or add it there (DeepSpeed calls this)."""
        assert group_idx is not None and param.grad is not None
        if not self._use_compact_grad_partition_buffer(group_idx):
            number = self.get_param_id(param)
            first, offset, elements = self._places[group_idx][number]
            source = param.grad.view(-1)[first : first + elements]
            target = self._gradient(group_idx)[offset : offset + elements]
            if number in self._taken:
                target.add_(source)
            else:
                target.copy_(source)
            self._taken.add(number)
        param.grad = None

    def _gradient(self, group: int) -> torch.Tensor:
        """Return the flat fp32 gradient of this rank's partition; its padding is zero."""
        master = self.single_partition_of_fp32_groups[group]
        if master.grad is None:
            master.grad = torch.empty_like(master)
            master.grad[master.numel() - self.groups_padding[group] :].zero_()
        return master.grad

    def independent_gradient_partition_epilogue(self) -> None:
        """Reduce what is left in the buckets after a backward pass (DeepSpeed calls this)."""
        if not self._alone:
            self.reduce_ipg_grads()
            self.params_already_reduced[:] = [False] * len(self.params_already_reduced)
            if self.overlap_comm and not get_accelerator().resolves_data_dependency():
                get_accelerator().current_stream().wait_stream(self.reduction_stream)
                self._clear_previous_reduced_grads()
        self._release_ipg_buffers()
        self._clear_param_grad_only()
        self._epilogue_ran_this_backward = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Unscale, clip, step and round; if a gradient is not finite, skip the step on all ranks."""
        for group in range(len(self._places)):
            self._complete(group)
        scale, scaled_norm = self.loss_scale, self._norm().item()  # waits for the device
        self.overflow = not math.isfinite(scaled_norm) and (
            self.dtype != torch.bfloat16 or self.check_grad_overflow
        )
        self._update_scale(self.overflow)
        self._global_grad_norm = math.inf if self.overflow else scaled_norm / scale
        if not self.overflow:
            gradients = [self._gradient(group) for group in range(len(self._places))]
            divide(self.optimizer, gradients, divisor_of(scaled_norm, scale, self.clip_grad))
            self.optimizer.step()
            self._lazy_init_hp_params_optimizer_state()
            self.update_lp_params()
        self._forget()

    def _complete(self, group: int) -> None:
        """Have the sums that DeepSpeed made as the gradient; zero what no gradient came for."""
        if self._use_compact_grad_partition_buffer(group):
            self.single_partition_of_fp32_groups[group].grad = self.averaged_gradients[group].flat_partition
            return
        for number, (_, offset, elements) in self._places[group].items():
            if number not in self._taken:
                self._gradient(group)[offset : offset + elements].zero_()

    def _norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole model's gradient times the loss scale."""
        total = sum_of_squares(
            *(
                [self._gradient(group)[a:b] for group, runs in enumerate(groups) for a, b in runs]
                for groups in self._runs
            )
        )
        if not self._alone:
            dist.all_reduce(total, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        return total.sqrt().float()

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Round the master weights into the model's, on all ranks (DeepSpeed calls this)."""
        for group, (parts, master) in enumerate(
            zip(self.parallel_partitioned_bit16_groups, self.single_partition_of_fp32_groups, strict=True)
        ):
            parts[dist.get_rank(self.real_dp_process_group[group])].copy_(master)
        if not self._alone:
            all_gather_dp_groups(
                groups_flat=self.bit16_groups_flat,
                partitioned_param_groups=self.parallel_partitioned_bit16_groups,
                dp_process_group=self.real_dp_process_group,
                start_alignment_factor=self.nccl_start_alignment_factor,
                allgather_bucket_size=self.allgather_bucket_size,
            )

    def _forget(self) -> None:
        """Forget the step's gradients. Host memory is kept: to touch fresh pages costs a pass."""
        self._taken.clear()
        for group, master in enumerate(self.single_partition_of_fp32_groups):
            self.averaged_gradients[group] = self.all_grad_tensors[group] = None
            if not get_accelerator().is_synchronized_device() or self._use_compact_grad_partition_buffer(
                group
            ):
                master.grad = None


class OffloadedStep(DeepSpeedZeroOptimizer):
    """ZeRO 1 and 2 with an offloaded optimizer."""

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Leave overflow to the norm (DeepSpeed calls this before it)."""

    def update_offload_overflow_tracker(self, grad: torch.Tensor) -> None:
        """Leave overflow to the norm (DeepSpeed calls this for every gradient)."""

    def set_norm_for_param_grad_in_gpu(self, param: torch.nn.Parameter) -> None:
        """Keep the sum of a gradient's squares on the device (DeepSpeed calls this)."""
        number, gradient = self.get_param_id(param), self.get_param_gradient_attribute(param)
        _, first, _, elements = self.grad_position[number]
        self.norm_for_param_grads[number] = sum_of_squares([gradient.view(-1)[first : first + elements]])

    def complete_grad_norm_calculation_for_cpu_offload(
        self, params: Sequence[torch.nn.Parameter]
    ) -> torch.Tensor:
        """Return the norm of a group's gradients over all ranks (DeepSpeed calls this)."""
        numbers = [number for p in params if (number := self.get_param_id(p)) in self.norm_for_param_grads]
        counted = [float(counts_here(self.param_dict[n], self.model_parallel_rank)) for n in numbers]
        device = get_accelerator().current_device_name()
        squares = [self.norm_for_param_grads[n] for n in numbers]
        total = torch.zeros((), dtype=get_norm_dtype(), device=device)
        if squares:  # an infinity times 0 is not finite either
            total = torch.stack(squares) @ torch.tensor(counted, dtype=get_norm_dtype(), device=device)
        dist.all_reduce(total, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        return total.sqrt().float().to(self.device)


class ShardedStep(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO 3."""

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Leave overflow to the norm (DeepSpeed calls this before it)."""

    def _constant_buffered_norm2(self, input: torch.Tensor, buffer_size: int = 0) -> torch.Tensor:
        """Return the norm of one gradient (DeepSpeed calls this for offloaded ones)."""
        return sum_of_squares([input]).sqrt()

    def get_grad_norm_direct(
        self, gradients: Sequence[torch.Tensor], params: Sequence[torch.nn.Parameter], norm_type: float = 2
    ) -> torch.Tensor:
        """Return the norm of a sub-group's gradients over all ranks (DeepSpeed calls this)."""
        kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for gradient, p in zip(gradients, params, strict=True):
            kinds[not counts_here(p, self.model_parallel_rank)].append(gradient)
        total = sum_of_squares(*kinds)
        dist.all_reduce(total, group=self._get_param_partition_group(params[0]))
        self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        return total.sqrt().float()

    @torch.no_grad()
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: torch.nn.Parameter) -> None:
        """Take the gradient at once on a single rank (DeepSpeed calls this when it is whole)."""
        if dist.get_world_size(self._get_param_partition_group(param)) > 1:
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
            return
        stream = self.reduce_and_partition_stream
        if not get_accelerator().resolves_data_dependency():
            stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            assert param.grad is not None
            self.partition_grads([param], [param.grad.view(-1)])
