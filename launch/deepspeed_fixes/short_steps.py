"""DeepSpeed's ZeRO 1 to 3 pass over the gradients more often than their arithmetic needs.

DeepSpeed 0.19.8, `runtime/zero/stage_1_and_2.py`, copies each gradient into a bucket, from there into a
buffer of its partition, from there into one flat tensor, and that one into fp32; looks at every element for
infinities, twelve kernels a tensor, and then computes the norm, which tells the same; multiplies by the
clipping factor before the optimizer reads the gradients again; and on one data-parallel rank averages,
reduces and gathers over a group of one. With an offloaded optimizer it waits for the device at every
gradient, at the end of every backward pass, and again at every norm. `stage3.py` looks at all gradients
twice more in fp16; on one data-parallel rank the host waits for every copy of a parameter, and then has the
computing stream wait too.

These classes keep its layout of states, its hooks, buckets and collectives. Under `FlatStep` a gradient,
reduced over data-parallel ranks, goes once into the partition's flat fp32 one; torch's fused AdamW takes the
factor along. An overflow is a norm that is not finite. `shorten_step` says what is left to DeepSpeed's way.

`runtime/bf16_optimizer.py` runs ZeRO-1 in bf16 with sums of gradients in fp32, plain and in a pipeline
(`data_types.grad_accum_dtype`). It writes zeros into the gradients of each micro-batch before they are added
to, and into the sums; copies the sums of the whole model twice to reduce them over all ranks, and does so for
a group of one; and clips by a norm that is too small on a CPU (zero0.py has figures). Under `SummedStep` the
first micro-batch's gradient is copied, and each rank gets the sum of its own partition.

The norm rounds otherwise than DeepSpeed's, and so do gradients divided in the kernel. Upstream: no issue.
Releases before 0.19.8 have other methods in ZeRO's optimizers, and keep them (`versions.is_as_overridden`).
`test_short_steps.py::test_deepspeed_has_what_the_short_steps_replace` fails when what they override changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import (
    NoGatherCoalescedHandle,
    ZeroParamStatus,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank

from launch.deepspeed_fixes import versions
from launch.deepspeed_fixes.norms import (
    by_count,
    counts_here,
    divide,
    divisor_of,
    norm_dtype,
    sum_of_squares,
)

Runs = list[tuple[int, int]]  # start and end of neighbouring elements in a partition


class Fragment(NamedTuple):
    """Elements of a partition from `offset` on, which are `parameter`'s elements from `first` on.

    `parameter`: this rank's tensor-parallel slice.
    """

    parameter: torch.nn.Parameter
    first: int
    offset: int
    elements: int

    def within(self, partition: torch.Tensor) -> torch.Tensor:
        """Return these elements of a partition's tensor, flat."""
        return partition.view(-1)[self.offset : self.offset + self.elements]


def fragments_of(group: Sequence[torch.nn.Parameter]) -> list[Fragment]:
    """List what lies of a group's parameters in this rank's flat partition under ZeRO 1 and 2."""
    fragments = []
    for parameter in group:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:
            here = mapping.hp_fragment_address
            there = mapping.lp_fragment_address
            fragments.append(Fragment(parameter, there.start, here.start, here.numel))
    return fragments


def shorten_step(engine: DeepSpeedEngine) -> str | None:
    """Have the engine's optimizer step the short way; return the setting that stands against it, or None."""
    optimizer = engine.optimizer
    if not versions.is_as_overridden(type(optimizer)):
        return f"DeepSpeed {versions.installed()}"
    if type(optimizer) is DeepSpeedZeroOptimizer:
        obstacles = {
            "zero_optimization.contiguous_gradients=false": not optimizer.contiguous_gradients,
            "zero_optimization.round_robin_gradients": optimizer.round_robin_gradients,
            "zero_optimization.parameter_alignment": optimizer.parameter_alignment,
            "data_types.grad_accum_dtype": not optimizer.cpu_offload
            and optimizer.use_grad_accum_attribute,
        }
        for setting, stands in obstacles.items():
            if stands:
                return setting
        if optimizer.cpu_offload:
            optimizer.__class__ = OffloadedStep
        else:
            optimizer.__class__ = FlatStep
            optimizer.begin()
    elif type(optimizer) is BF16_Optimizer:
        optimizer.__class__ = SummedStep
        optimizer.begin(engine)
    elif type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        optimizer.__class__ = ShardedStep
        partition_parameters.NoGatherHandle = lambda parameter: OrderedCopies(
            [parameter]
        )
        partition_parameters.NoGatherCoalescedHandle = OrderedCopies
    return None


class _Partitions:
    """This rank's flat fp32 partition of each group of parameters, and where gradients lie in it."""

    def find_places(
        self,
        groups: Sequence[Sequence[torch.nn.Parameter]],
        dp_group: dist.ProcessGroup,
        tensor_rank: int,
    ) -> None:
        """Find the place of each gradient, once the optimizer is built."""
        self._alone = dist.get_world_size(dp_group) == 1
        self._places = []
        # Runs of neighbouring places of each group: those that count in the norm, and the others.
        self._runs: list[tuple[Runs, Runs]] = []
        for group in groups:
            places = {each.parameter: each for each in fragments_of(group)}
            self._places.append(places)
            self._runs.append(_find_runs(places.values(), tensor_rank))

    def norm_over_ranks(
        self, gradients: Sequence[torch.Tensor], *groups: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """Return the L2 norm of the whole model's gradient, which lies on the ranks of some groups."""
        kinds: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for gradient, both in zip(gradients, self._runs, strict=True):
            for parts, runs in zip(kinds, both, strict=True):
                parts += [gradient[start:end] for start, end in runs]
        total = sum_of_squares(*kinds)
        for group in groups:
            if group is not None and dist.get_world_size(group) > 1:
                dist.all_reduce(total, group=group)
        return total.sqrt().float()


def _find_runs(places: Iterable[Fragment], tensor_rank: int) -> tuple[Runs, Runs]:
    """Return start and end of neighbouring places: those that count in the norm, and the others."""
    kinds: tuple[Runs, Runs] = ([], [])
    for parameter, _, offset, elements in places:
        runs = kinds[not counts_here(parameter, tensor_rank)]
        start = runs.pop()[0] if runs and runs[-1][1] == offset else offset
        runs.append((start, offset + elements))
    return kinds


class OrderedEnd:
    """The end of a backward pass under ZeRO 1 and 2, for which no host waits."""

    _alone = False

    def independent_gradient_partition_epilogue(self: Any) -> None:
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


# DeepSpeed's classes have no types: mypy ignores that here and below.
class FlatStep(_Partitions, OrderedEnd, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """ZeRO 1 and 2 with one copy of each gradient, one norm, and nothing over a group of one."""

    def begin(self) -> None:
        self.find_places(
            self.bit16_groups, self.dp_process_group, self.model_parallel_rank
        )
        self._taken: set[torch.nn.Parameter] = set()  # with a gradient in this step

    def _use_compact_grad_partition_buffer(self, group_idx: int) -> bool:
        """Say whether reduced gradients go to DeepSpeed's own fp32 sums (DeepSpeed calls this)."""
        return not getattr(
            self, "_alone", False
        ) and super()._use_compact_grad_partition_buffer(group_idx)

    def setup_buckets(self) -> None:
        """Make buckets where gradients are reduced (DeepSpeed calls this)."""
        if not self._alone:
            super().setup_buckets()

    def reduce_independent_p_g_buckets_and_remove_grads(
        self, param: torch.nn.Parameter, i: int
    ) -> None:
        """Take the gradient at once on a single rank (DeepSpeed calls this when it is whole)."""
        if not self._alone:
            super().reduce_independent_p_g_buckets_and_remove_grads(param, i)
        elif getattr(param, "ds_grad_is_ready", True):
            self.copy_grads_in_partition(param, i)

    @torch.no_grad()
    def copy_grads_in_partition(
        self, param: torch.nn.Parameter, group_idx: int | None = None
    ) -> None:
        """Move a reduced gradient into the partition's, or add it there (DeepSpeed calls this)."""
        assert group_idx is not None and param.grad is not None
        if not self._use_compact_grad_partition_buffer(group_idx):
            _, first, offset, elements = self._places[group_idx][param]
            source = param.grad.view(-1)[first : first + elements]
            target = self._gradient(group_idx)[offset : offset + elements]
            if param in self._taken:
                target.add_(source)
            else:
                target.copy_(source)
            self._taken.add(param)
        param.grad = None

    def _gradient(self, group: int) -> torch.Tensor:
        """Return the flat fp32 gradient of this rank's partition; its padding is zero."""
        master: torch.Tensor = self.single_partition_of_fp32_groups[group]
        if master.grad is None:
            master.grad = torch.empty_like(master)
            master.grad[master.numel() - self.groups_padding[group] :].zero_()
        return master.grad

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Unscale, clip, step and round; if a gradient is not finite, skip the step on all ranks."""
        gradients = []
        for group in range(len(self._places)):
            self._complete(group)
            gradients.append(self._gradient(group))
        scale = self.loss_scale
        groups = (self.dp_process_group, self.model_parallel_group)
        scaled_norm = self.norm_over_ranks(gradients, *groups).item()  # waits
        self.overflow = not math.isfinite(scaled_norm) and (
            self.dtype != torch.bfloat16 or self.check_grad_overflow
        )
        self._update_scale(self.overflow)
        self._global_grad_norm = math.inf if self.overflow else scaled_norm / scale
        if not self.overflow:
            divide(
                self.optimizer,
                gradients,
                divisor_of(scaled_norm, scale, self.clip_grad),
            )
            self.optimizer.step()
            self._lazy_init_hp_params_optimizer_state()
            self.update_lp_params()
        self._forget()

    def _complete(self, group: int) -> None:
        """Have the sums that DeepSpeed made as the gradient; zero what no gradient came for."""
        if self._use_compact_grad_partition_buffer(group):
            # Which builds it on a rank whose part of the group is padding: no gradient came there.
            sums = self._get_compact_grad_partition_buffer(group).flat_partition
            self.single_partition_of_fp32_groups[group].grad = sums
            return
        for parameter, _, offset, elements in self._places[group].values():
            if parameter not in self._taken:
                self._gradient(group)[offset : offset + elements].zero_()

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Round the master weights into the model's, on all ranks (DeepSpeed calls this)."""
        for parts, master, group in zip(
            self.parallel_partitioned_bit16_groups,
            self.single_partition_of_fp32_groups,
            self.real_dp_process_group,
            strict=True,
        ):
            parts[dist.get_rank(group)].copy_(master)
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
            in_host_memory = get_accelerator().is_synchronized_device()
            if not in_host_memory or self._use_compact_grad_partition_buffer(group):
                master.grad = None


class SummedStep(_Partitions, BF16_Optimizer):  # type: ignore[misc]
    """ZeRO 1 in bf16 with sums in fp32, without the passes that write zeros or copy over a group of one."""

    def begin(self, engine: DeepSpeedEngine) -> None:
        """Take the reduction of the sums from the engine."""
        tensor_rank = bwc_tensor_model_parallel_rank(mpu=self.mpu)
        self.find_places(self.bf16_groups, self.dp_process_group, tensor_rank)
        self._reduces_here = engine.communication_data_type == torch.float32
        if self._alone or self._reduces_here:
            engine.buffered_allreduce_fallback = self.reduce_sums

    def clear_lp_grads(self, set_to_none: bool = True) -> None:
        """Free the gradients of a micro-batch (DeepSpeed calls this before and after each)."""
        for group in self.bf16_groups:
            for parameter in group:
                parameter.grad = None

    def clear_hp_grads(self) -> None:
        """Forget the sums; their memory is written over (DeepSpeed calls this after a step)."""
        self.fp32_groups_has_gradients = [
            [False] * len(group) for group in self.bf16_groups
        ]

    @torch.no_grad()
    def _update_hp_grad(
        self,
        lp: torch.nn.Parameter,
        group_idx: int,
        param_idx: int,
        clear_lp_grads: bool,
    ) -> None:
        """Begin or continue the sum of a parameter's gradients (DeepSpeed calls this after a micro-batch)."""
        if lp.grad is None:
            return
        sums = self.fp32_groups_gradients[group_idx]
        begun = self.fp32_groups_has_gradients[group_idx]
        total = sums[param_idx]
        if begun[param_idx]:
            total.add_(lp.grad.view(-1))
        else:
            total.copy_(lp.grad.view(-1))
        lp._hp_grad = total  # type: ignore[attr-defined]
        begun[param_idx] = True

    def get_grads_for_reduction(
        self,
    ) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
        """Return the flat sums; zeros where no gradient came (DeepSpeed calls this before it reduces)."""
        for sums, came in zip(
            self.fp32_groups_gradients, self.fp32_groups_has_gradients, strict=True
        ):
            for one, is_there in zip(sums, came, strict=True):
                if not is_there:
                    one.zero_()
        return self.non_expert_gradients, {}

    def reduce_sums(self, **_: object) -> None:
        """Give each rank the sum of its partition over the data-parallel ranks (DeepSpeed calls this)."""
        whole = self.get_grads_for_reduction()[0]
        if not self._alone:
            for sums, partition in zip(
                whole, self.fp32_groups_gradient_flat_partition, strict=True
            ):
                dist.reduce_scatter_tensor(partition, sums, group=self.dp_process_group)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Average, clip, step and round; if a gradient is not finite, skip the step on all ranks."""
        sums = self.fp32_groups_gradient_flat_partition
        ranks = dist.get_world_size(self.dp_process_group) if self._reduces_here else 1
        tensor_group = None if self.mpu is None else self.mpu.get_model_parallel_group()
        # of the sum; waits
        norm = self.norm_over_ranks(sums, self.dp_process_group, tensor_group).item()
        self.overflow = not math.isfinite(norm)
        self._global_grad_norm = math.inf if self.overflow else norm / ranks
        if not self.overflow:
            for master, gradient in zip(
                self.fp32_groups_flat_partition, sums, strict=True
            ):
                master.grad = gradient
            divide(self.optimizer, sums, divisor_of(norm, ranks, self.clip_grad))
            self.optimizer.step()
            self._lazy_init_hp_params_optimizer_state()
            self.update_lp_params()
        self.clear_hp_grads()


class OffloadedStep(OrderedEnd, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """ZeRO 1 and 2 with an offloaded optimizer."""

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Leave overflow to the norm (DeepSpeed calls this before it)."""

    def update_offload_overflow_tracker(self, grad: torch.Tensor) -> None:
        """Leave overflow to the norm (DeepSpeed calls this for every gradient)."""

    def reset_cpu_buffers(self) -> None:
        """Forget a step's gradients; of a skipped one DeepSpeed keeps the sums in fp32, and adds to them."""
        super().reset_cpu_buffers()
        for group in range(len(self.bit16_groups)):
            self.averaged_gradients[group] = None

    def async_accumulate_grad_in_cpu_via_gpu(self, param: torch.nn.Parameter) -> None:
        """Add a gradient to its sum in host memory (DeepSpeed calls this).

        A copy from pinned memory waits in its stream for those before it. Else the host waits for them.
        """
        if self.cpu_offload_pin_memory:
            stream = get_accelerator().current_stream()
            for copied in self._pending_offload_events.values():
                stream.wait_event(copied)
            self._pending_offload_events.clear()
        super().async_accumulate_grad_in_cpu_via_gpu(param)

    def set_norm_for_param_grad_in_gpu(self, param: torch.nn.Parameter) -> None:
        """Keep a gradient's norm on the device (DeepSpeed calls this)."""
        number = self.get_param_id(param)
        gradient = self.get_param_gradient_attribute(param)
        _, first, _, elements = self.grad_position[number]
        self.norm_for_param_grads[number] = sum_of_squares(
            [gradient.view(-1)[first : first + elements]]
        ).sqrt()

    def complete_grad_norm_calculation_for_cpu_offload(
        self, params: Sequence[torch.nn.Parameter]
    ) -> torch.Tensor:
        """Return the norm of a group's gradients over all ranks (DeepSpeed calls this)."""
        found = self.norm_for_param_grads
        norms_of = ((p, found.get(self.get_param_id(p))) for p in params)
        kinds = by_count(norms_of, self.model_parallel_rank)
        device = get_accelerator().current_device_name()
        total = torch.zeros((), dtype=norm_dtype(), device=device)
        for norms, weight in zip(kinds, (1.0, 0.0), strict=True):
            if norms:  # an infinity times 0 is not finite either
                total = total + weight * torch.stack(norms).square().sum()
        dist.all_reduce(total, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        return total.sqrt().float().to(self.device)


class ShardedStep(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """ZeRO 3."""

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Leave overflow to the norm (DeepSpeed calls this before it)."""

    def _constant_buffered_norm2(
        self, input: torch.Tensor, buffer_size: int = 0
    ) -> torch.Tensor:
        """Return the norm of one gradient (DeepSpeed calls this for offloaded ones)."""
        return sum_of_squares([input]).sqrt()

    def get_grad_norm_direct(
        self,
        gradients: Sequence[torch.Tensor],
        params: Sequence[torch.nn.Parameter],
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Return the norm of a sub-group's gradients over all ranks (DeepSpeed calls this)."""
        pairs = zip(params, gradients, strict=True)
        total = sum_of_squares(*by_count(pairs, self.model_parallel_rank))
        dist.all_reduce(total, group=self._get_param_partition_group(params[0]))
        self._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
        return total.sqrt().float()

    @torch.no_grad()
    def reduce_independent_p_g_buckets_and_remove_grads(
        self, param: torch.nn.Parameter
    ) -> None:
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


class OrderedCopies(NoGatherCoalescedHandle):  # type: ignore[misc]
    """Parameters of ZeRO 3 on one data-parallel rank, copied in the order of their stream."""

    ended = False

    def wait(self, **_: object) -> None:
        """End the copies; the host need not wait (DeepSpeed calls this for each: some may be released)."""
        for parameter in () if self.ended else self._NoGatherCoalescedHandle__params:
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        self.ended = True
