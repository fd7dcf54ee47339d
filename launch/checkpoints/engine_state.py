"""An engine's state in full precision on this rank: master weights and the optimizer's moments.

A `Partition` is one buffer of master weights, flat or a whole parameter, with its optimizer state. Its
fragments map parts of parameters to places in the buffer. No other module knows the layouts of DeepSpeed
0.19.8:

- stage 0: a buffer per parameter, the parameter itself in fp32, whole on every data-parallel rank;
- stages 1 and 2, and BF16_Optimizer: a flat buffer per group of parameters, cut over the data-parallel ranks
  without regard to parameters;
- stage 3: flat buffers (sub-groups) of one piece of each parameter, all of a length, the last ones padded; on
  NVMe they are read in and written back one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from launch.checkpoints.names import MOMENTS, WEIGHT, Kind
from launch.deepspeed_fixes.short_steps import Fragment, fragments_of
from modeling.cost.parameter_count import is_hidden_matrix
from modeling.initialization import canonical_name, shard_of
from modeling.parallel.process_grid import ProcessGrid

if TYPE_CHECKING:
    from launch.checkpoints.manifest import Progress, ScalerState
    from launch.deepspeed_fixes.zero0 import MasterWeights

ROUNDED = "rounded"  # the kind of low-precision weights
# elements; smaller tensors are listed together, to be added up by one kernel
SMALL = 2**20


@dataclass(frozen=True)
class Partition:
    """A buffer of master weights.

    Attributes:
        master: returns the buffer, after `open`.
        open: reads in the buffer and its moments if they are on NVMe; `close` releases them.
        write_back: rounds the buffer into the model's weights, if that is done buffer by buffer, and writes
            it back to NVMe.
        swapped: it is on NVMe.
    """

    fragments: tuple[Fragment, ...]
    master: Callable[[], torch.Tensor]
    open: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    write_back: Callable[[], None] = lambda: None
    swapped: bool = False


@dataclass(frozen=True)
class Buffer:
    """Tensors of one kind and type in which nothing but an optimizer step writes.

    Attributes:
        kind: WEIGHT for master weights, ROUNDED for low-precision ones, or a moment's name.
        tensors: ZeRO-3's gathered parameters are empty while they are released.
        fragments: with offsets in the tensors, one after another.
        copied: the axis of the grid ("dp", "tp") along which every rank holds the same.
    """

    kind: str
    tensors: tuple[torch.Tensor, ...]
    fragments: tuple[Fragment, ...]
    copied: str = ""


class EngineState:
    """The full-precision state of one engine on this rank."""

    def __init__(self, engine: DeepSpeedEngine, grid: ProcessGrid):
        self.engine = engine
        self.grid = grid
        self.zero = engine.optimizer
        # Every data-parallel rank has the whole state, and each writes a share.
        self.shared = not isinstance(
            self.zero,
            (DeepSpeedZeroOptimizer, BF16_Optimizer, DeepSpeedZeroOptimizer_Stage3),
        )
        if getattr(self.zero, "round_robin_gradients", False):
            from launch.deepspeed_fixes.round_robin import link_in_order

            link_in_order(self.zero)
        self._master_weights: MasterWeights | None = None  # of stage 0 in fp16 and bf16
        if self.shared:
            from launch.deepspeed_fixes.zero0 import MasterWeights

            if isinstance(self.zero, MasterWeights):
                self._master_weights = self.zero
        self._open_partition: Partition | None = None

    @cached_property
    def partitions(self) -> tuple[Partition, ...]:
        """All partitions of this rank."""
        zero = self.zero
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            numbers = range(len(zero.fp16_groups))
            return tuple(self._sub_group(zero, number) for number in numbers)
        if isinstance(zero, DeepSpeedZeroOptimizer):
            masters = zero.single_partition_of_fp32_groups
            return tuple(map(_flat_group, zero.round_robin_bit16_groups, masters))
        if isinstance(zero, BF16_Optimizer):
            masters = zero.fp32_groups_flat_partition
            return tuple(map(_flat_group, zero.bf16_groups, masters))
        if self._master_weights is not None:
            return tuple(_whole(*pair) for pair in self._master_weights.pairs)
        every = chain.from_iterable(group["params"] for group in zero.param_groups)
        return tuple(_whole(parameter, parameter) for parameter in every)

    @property
    def adam(self) -> torch.optim.Optimizer:
        """The basic optimizer within DeepSpeed's."""
        basic: torch.optim.Optimizer = self.engine.basic_optimizer
        return basic

    @property
    def adam_steps(self) -> int:
        """Number of Adam's updates; 0: there are no moments yet."""
        return max(self.adam_step_counts, default=0)

    @property
    def adam_step_counts(self) -> set[int]:
        """The numbers of updates by which Adam corrects its bias, of all its states."""
        return {
            int(state["step"]) for state in self.adam.state.values() if "step" in state
        }

    def progress(self) -> Progress:
        """Return the progress that the engine has counted."""
        from launch.checkpoints.manifest import Progress

        engine = self.engine
        schedule = engine.lr_scheduler.state_dict()["completed"]
        return Progress(
            engine.global_steps,
            self.adam_steps,
            schedule,
            engine.skipped_steps,
            self.scaler(),
        )

    def buffers(self) -> list[Buffer]:
        """List low-precision weights, master weights and moments, without those on NVMe."""
        groups: dict[tuple[object, ...], list[Buffer]] = {}
        for number, buffer in enumerate(self._buffers()):
            first = buffer.tensors[0]
            small = first.numel() < SMALL
            key = (
                buffer.kind,
                buffer.copied,
                first.dtype,
                first.device,
                0 if small else number + 1,
            )
            groups.setdefault(key, []).append(buffer)
        return [_joined(buffers) for buffers in groups.values()]

    def _buffers(self) -> Iterator[Buffer]:
        """Yield buffers of one tensor each."""
        copied = "dp" if self.shared else ""
        for partition in self.partitions:
            if partition.swapped:
                continue
            master = partition.master()
            fragments = partition.fragments
            for kind, numbers in {
                WEIGHT: master,
                **self.adam.state.get(master, {}),
            }.items():
                if isinstance(numbers, torch.Tensor) and numbers.shape == master.shape:
                    yield Buffer(kind, (numbers,), fragments, copied)
                    yield from self._held_twice(kind, numbers, fragments)
        yield from self._rounded()

    def _rounded(self) -> Iterator[Buffer]:
        """Yield the low-precision weights."""
        zero = self.zero
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            for partition, flat in zip(
                self.partitions, zero.fp16_partitioned_groups_flat, strict=True
            ):
                if flat is not None:  # None: on NVMe
                    yield Buffer(ROUNDED, (flat,), partition.fragments)
            for parameter in zero.persistent_parameters:
                yield _whole_buffer(ROUNDED, parameter, parameter, "dp")
        elif self._master_weights is not None:
            for parameter, _ in self._master_weights.pairs:
                yield _whole_buffer(ROUNDED, parameter, parameter, "dp")
        elif isinstance(zero, DeepSpeedZeroOptimizer):
            yield from map(_flat_buffer, zero.bit16_groups, zero.bit16_groups_flat)
        elif isinstance(zero, BF16_Optimizer):
            yield from map(_flat_buffer, zero.bf16_groups, zero.bf16_groups_flat)

    def _held_twice(
        self, kind: str, numbers: torch.Tensor, fragments: Iterable[Fragment]
    ) -> Iterator[Buffer]:
        """Yield what all tensor-parallel ranks hold of a partition."""
        for fragment in fragments:
            parameter = fragment.parameter
            if self.grid.tp > 1 and fragment.elements and not is_cut(parameter):
                part = fragment.within(numbers.detach())
                yield _whole_buffer(kind, parameter, part, "tp")

    def owned(self, partition: Partition) -> Iterator[Fragment]:
        """Yield the fragments that this rank writes: one rank writes each number."""
        from launch.checkpoints.geometry import share

        for fragment in partition.fragments:
            if not self._writes(fragment.parameter):
                continue
            if self.shared:
                skipped, count = share(fragment.elements, self.grid.at.dp, self.grid.dp)
                first = fragment.first + skipped
                offset = fragment.offset + skipped
                fragment = Fragment(fragment.parameter, first, offset, count)
            if fragment.elements:
                yield fragment

    def held(self, partition: Partition, kinds: Iterable[Kind]) -> list[Kind]:
        """Return those of `kinds` that a partition has: Muon's matrices have one moment."""
        if partition.fragments and hasattr(self.adam, "matrices"):
            parameter = partition.fragments[0].parameter
            # ZeRO-3 leaves an empty tensor behind.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if is_hidden_matrix(canonical_name(parameter), len(shape)):
                return [kind for kind in kinds if kind != MOMENTS[1]]
        return list(kinds)

    def dtype(self, partition: Partition, kind: str) -> torch.dtype:
        """Return the type of the numbers from `read`."""
        if kind == WEIGHT:
            return partition.master().dtype
        every = (
            state[kind].dtype for state in self.adam.state.values() if kind in state
        )
        return next(every, torch.float32)

    def read(self, partition: Partition, fragment: Fragment, kind: str) -> torch.Tensor:
        """Read a fragment's flat elements of master weights or a moment.

        They are valid while the partition is open: until `close`, or a `read` of another one. Raises KeyError
        for an absent moment.
        """
        self.open(partition)
        master = partition.master()
        buffer = master if kind == WEIGHT else self.adam.state[master][kind]
        return fragment.within(buffer.detach())

    def stale_weights(self) -> Iterator[str]:
        """Yield names of tensors whose weights in the model are not this rank's master weights, rounded.

        ZeRO-3 has this rank's part of them, which is empty on NVMe.
        """
        for partition in self.partitions:
            for fragment in partition.fragments:
                parameter, first, _, elements = fragment
                whole = parameter.view(-1)[first:]
                weights = getattr(parameter, "ds_tensor", whole).view(-1)[:elements]
                master = self.read(partition, fragment, WEIGHT)
                if len(weights) and not torch.equal(weights, master.to(weights)):
                    yield canonical_name(parameter)
        self.close()

    def open(self, partition: Partition) -> None:
        """Hold a partition in memory, and no other."""
        if self._open_partition is not partition:
            self.close()
            partition.open()
            self._open_partition = partition

    def close(self) -> None:
        """Close the open partition."""
        if self._open_partition is not None:
            self._open_partition.close()
            self._open_partition = None

    def write_back(self) -> None:
        """Write back the new numbers of the open partition, and close it."""
        assert self._open_partition is not None, "only an open partition is filled"
        self._open_partition.write_back()
        self._open_partition = None

    def begin_filling(self) -> None:
        """Free gathered weights, which become out of date. Collective."""
        if isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            self.zero._partition_all_parameters()

    def new_moments(
        self, partition: Partition, steps: int, names: Iterable[str]
    ) -> None:
        """Give the open partition the state of an optimizer after `steps` updates, with empty moments."""
        master = partition.master()
        adam = self.adam
        dtype = master.dtype
        step: int | torch.Tensor = steps
        if isinstance(adam, DeepSpeedCPUAdam):
            dtype = torch.float32 if adam.fp32_optimizer_states else master.dtype
        elif isinstance(adam, torch.optim.AdamW):
            group = adam.param_groups[0]
            on_device = group.get("capturable") or group.get("fused")
            device = master.device if on_device else torch.device("cpu")
            step = torch.tensor(float(steps), device=device)
        elif not isinstance(adam, FusedAdam):
            raise ValueError(
                f"a checkpoint cannot be read into an optimizer of type {type(adam).__name__}"
            )
        state: dict[str, Any] = {
            name: torch.zeros_like(master.data, dtype=dtype) for name in names
        }
        # Muon corrects no bias, and counts no steps.
        if MOMENTS[1] in state:
            state["step"] = step
        adam.state[master] = state

    def finish(self) -> None:
        """Round the master weights into the model's, once all partitions are filled. Collective."""
        zero = self.zero
        if isinstance(zero, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
            zero.update_lp_params()
            zero._hp_optimizer_states_linked = False  # to the states that were replaced
        elif isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            zero.invalidate_secondary_tensor()
        elif self._master_weights is not None:
            self._master_weights.round_weights()
        if isinstance(self.adam, DeepSpeedCPUAdam):
            from launch.deepspeed_fixes.cpu_adam_bias_correction import (
                replay_bias_correction,
            )

            replay_bias_correction(self.adam)

    def scaler(self) -> ScalerState | None:
        """Return the state of a dynamic fp16 loss scaler; None without one."""
        from launch.checkpoints.manifest import ScalerState

        scaler = self._dynamic_scaler()
        names = [each.name for each in fields(ScalerState)]
        return scaler and ScalerState(**{name: getattr(scaler, name) for name in names})

    def set_scaler(self, state: ScalerState | None) -> None:
        """Continue a dynamic scaler from `state`, by the JSON's rules. None: it starts afresh."""
        scaler = self._dynamic_scaler()
        if scaler is not None and state is not None:
            vars(scaler).update(asdict(state))

    def _dynamic_scaler(self) -> Any:
        if not self.engine.fp16_enabled():
            return None
        scaler = self.zero.loss_scaler
        return scaler if scaler.dynamic else None

    def _writes(self, parameter: torch.nn.Parameter) -> bool:
        """Check that this rank writes the parameter, not another tensor-parallel rank or pipeline stage."""
        # a tied copy on a later stage
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return self.grid.at.tp == 0 or is_cut(parameter)

    def _sub_group(self, zero: DeepSpeedZeroOptimizer_Stage3, number: int) -> Partition:
        swapped = zero._swappable_optimizer_subgroup(number)
        fragments = []
        for parameter in zero.fp16_groups[number]:
            _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            rank = dist.get_rank(parameter.ds_process_group)
            # Of two numbers on four ranks the last ones hold padding, behind the end.
            first = min(length * rank, parameter.ds_numel)
            count = min(length, parameter.ds_numel - first)
            fragments.append(Fragment(parameter, first, offset, count))

        def write_back() -> None:
            zero._reassign_or_swap_out_partitioned_parameters(number)
            if swapped:
                zero._optimizer_states_and_gradient_swap_out(number)

        masters: list[torch.Tensor] = zero.fp32_partitioned_groups_flat

        def master() -> torch.Tensor:
            return masters[number]

        if not swapped:
            return Partition(tuple(fragments), master, write_back=write_back)
        read_in = partial(zero._optimizer_states_and_gradient_swap_in, number)
        release = partial(zero._release_swap_buffers, number)
        return Partition(tuple(fragments), master, read_in, release, write_back, True)


def _flat_group(
    parameters: list[torch.nn.Parameter], master: torch.Tensor
) -> Partition:
    """Describe this rank's part of a group's flat master weights under ZeRO 1 and 2."""
    return Partition(tuple(fragments_of(parameters)), lambda: master)


def is_cut(parameter: torch.nn.Parameter) -> bool:
    """Check whether tensor-parallel ranks hold different slices of a parameter."""
    shard = shard_of(parameter)
    return shard is not None and shard.size > 1


def _whole_buffer(
    kind: str, parameter: torch.nn.Parameter, numbers: torch.Tensor, copied: str
) -> Buffer:
    elements = getattr(parameter, "ds_numel", numbers.numel())
    return Buffer(kind, (numbers,), (Fragment(parameter, 0, 0, elements),), copied)


def _flat_buffer(group: list[torch.nn.Parameter], flat: torch.Tensor) -> Buffer:
    """Describe the low-precision weights of a group of parameters, which are views of a flat tensor."""
    fragments = []
    for parameter in group:
        offset = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
        fragments.append(Fragment(parameter, 0, offset, parameter.numel()))
    return Buffer(ROUNDED, (flat,), tuple(fragments), "dp")


def _joined(buffers: list[Buffer]) -> Buffer:
    """Join buffers of one tensor each."""
    tensors: list[torch.Tensor] = []
    fragments: list[Fragment] = []
    start = 0
    for buffer in buffers:
        for parameter, first, offset, elements in buffer.fragments:
            fragments.append(Fragment(parameter, first, start + offset, elements))
        tensors += buffer.tensors
        # of a released parameter
        start += buffer.tensors[0].numel() or buffer.fragments[0].elements
    return Buffer(buffers[0].kind, tuple(tensors), tuple(fragments), buffers[0].copied)


def _whole(parameter: torch.nn.Parameter, master: torch.Tensor) -> Partition:
    fragment = Fragment(parameter, 0, 0, parameter.numel())
    return Partition((fragment,), lambda: master)
