"""An engine's state in full precision on this rank: master weights and Adam's moments.

A `Partition` is one buffer of master weights, flat or a whole parameter, with the optimizer's state of it.
Its fragments say which elements of which parameters lie where in it. This is the only place that knows how
DeepSpeed 0.19.8 lays them out under every stage:

- stage 0: a buffer per parameter, the parameter itself in fp32, whole on every data-parallel rank;
- stages 1 and 2, and BF16_Optimizer: a flat buffer per group of parameters, cut over the data-parallel ranks
  without regard to parameters;
- stage 3: flat buffers (sub-groups) of one piece of each parameter, all of a length, the last ones padded; on
  NVMe they are read in and written back one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from launch.checkpoints.geometry import share
from launch.checkpoints.manifest import MOMENTS, WEIGHT
from launch.deepspeed_fixes.cpu_adam_bias_correction import replay_bias_correction
from launch.deepspeed_fixes.zero0 import MasterWeights
from modeling.initialization import shard_of
from modeling.parallel.process_grid import ProcessGrid

SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")  # state of a DynamicLossScaler


class Fragment(NamedTuple):
    """Elements of a partition from `offset` on: those of `parameter` from `first` on.

    `parameter`'s elements are those of this rank's tensor-parallel slice.
    """

    parameter: torch.nn.Parameter
    first: int
    offset: int
    elements: int


@dataclass(frozen=True)
class Partition:
    """A buffer of master weights.

    Attributes:
        master: the buffer, once it is open.
        open: reads it in, with its moments, where it is elsewhere; `close` lets it go again.
        write_back: rounds it into the weights that compute, where that is done one buffer at a time, and puts
            it back where it was.
    """

    fragments: tuple[Fragment, ...]
    master: Callable[[], torch.Tensor]
    dtype: torch.dtype
    open: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    write_back: Callable[[], None] = lambda: None


class EngineState:
    """The full-precision state of one engine on this rank."""

    def __init__(self, engine: DeepSpeedEngine, grid: ProcessGrid):
        self.engine, self.grid, self.zero = engine, grid, engine.optimizer
        self.partitions = tuple(self._partitions())
        self._opened: Partition | None = None
        # Where every data-parallel rank has everything, each writes a share.
        self._shared = not isinstance(
            self.zero, (DeepSpeedZeroOptimizer, BF16_Optimizer, DeepSpeedZeroOptimizer_Stage3)
        )

    @property
    def adam(self) -> torch.optim.Optimizer:
        """The optimizer within DeepSpeed's."""
        return self.engine.basic_optimizer

    @property
    def adam_steps(self) -> int:
        """Updates that Adam made; 0: there are no moments yet."""
        steps = (int(state["step"]) for state in self.adam.state.values() if "step" in state)
        return max(steps, default=0)

    def owned(self, partition: Partition) -> Iterator[Fragment]:
        """The fragments that this rank writes: each number is written by one rank."""
        for fragment in partition.fragments:
            if not self._writes(fragment.parameter):
                continue
            if self._shared:
                skipped, count = share(fragment.elements, self.grid.at.dp, self.grid.dp)
                first, offset = fragment.first + skipped, fragment.offset + skipped
                fragment = Fragment(fragment.parameter, first, offset, count)
            if fragment.elements:
                yield fragment

    def dtype(self, partition: Partition, kind: str) -> torch.dtype:
        """The type of the numbers that `read` gives."""
        if kind == WEIGHT:
            return partition.dtype
        every = (state[kind].dtype for state in self.adam.state.values() if kind in state)
        return next(every, torch.float32)

    def read(self, partition: Partition, fragment: Fragment, kind: str) -> torch.Tensor:
        """Flat elements of a fragment, of the master weights or of a moment; valid until the next `read`.

        Leaves the partition open, for the next fragment of it; `close` closes it.
        """
        self.open(partition)
        master = partition.master()
        buffer = master if kind == WEIGHT else self.adam.state[master][kind]
        return buffer.detach().view(-1)[fragment.offset : fragment.offset + fragment.elements]

    def open(self, partition: Partition) -> None:
        """Have the numbers of a partition in memory, and those of no other."""
        if self._opened is not partition:
            self.close()
            partition.open()
            self._opened = partition

    def close(self) -> None:
        """Close the open partition."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def write_back(self) -> None:
        """Keep the new numbers of the open partition, and close it."""
        assert self._opened is not None, "only an open partition is filled"
        self._opened.write_back()
        self._opened = None

    def begin_filling(self) -> None:
        """Free gathered weights, which are out of date. Collective."""
        if isinstance(self.zero, DeepSpeedZeroOptimizer_Stage3):
            self.zero._partition_all_parameters()

    def new_moments(self, partition: Partition, steps: int) -> None:
        """Give the open partition the state of an optimizer after `steps` updates, with empty moments."""
        master, adam = partition.master(), self.adam
        dtype = master.dtype
        step: int | torch.Tensor = steps
        if isinstance(adam, DeepSpeedCPUAdam):
            dtype = torch.float32 if adam.fp32_optimizer_states else master.dtype
        elif isinstance(adam, torch.optim.AdamW):
            group = adam.param_groups[0]
            on_device = group["capturable"] or group["fused"]
            step = torch.tensor(float(steps), device=master.device if on_device else "cpu")
        elif not isinstance(adam, FusedAdam):
            raise ValueError(f"a checkpoint cannot be read into an optimizer of type {type(adam).__name__}")
        moments = {name: torch.zeros_like(master.data, dtype=dtype) for name in MOMENTS}
        adam.state[master] = {"step": step, **moments}

    def finish(self) -> None:
        """Round the master weights into the model's, once all partitions are filled. Collective."""
        zero = self.zero
        if isinstance(zero, (DeepSpeedZeroOptimizer, BF16_Optimizer)):
            zero.update_lp_params()
            zero._hp_optimizer_states_linked = False  # to the states that were replaced
        elif isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            zero.invalidate_secondary_tensor()
        elif isinstance(zero, MasterWeights):
            zero.round_weights()
        replay_bias_correction(self.adam)

    def scaler(self) -> dict[str, float] | None:
        """The state of a dynamic fp16 loss scaler; None without one."""
        scaler = self._dynamic_scaler()
        return None if scaler is None else {name: getattr(scaler, name) for name in SCALER}

    def set_scaler(self, state: dict[str, float] | None) -> None:
        """Let a dynamic scaler go on from `state`; its rules stay the JSON's. None: it starts afresh."""
        scaler = self._dynamic_scaler()
        if scaler is not None and state is not None:
            whole = {name: int(value) for name, value in state.items() if name != "cur_scale"}
            vars(scaler).update(whole, cur_scale=state["cur_scale"])

    def _dynamic_scaler(self) -> Any:
        if not self.engine.fp16_enabled():
            return None
        scaler = self.zero.scaler if isinstance(self.zero, MasterWeights) else self.zero.loss_scaler
        return scaler if scaler.dynamic else None

    def _writes(self, parameter: torch.nn.Parameter) -> bool:
        """Whether no other tensor-parallel rank or pipeline stage writes the same numbers."""
        if getattr(parameter, "ds_pipe_replicated", False):  # a copy that is tied, on a later stage
            return False
        shard = shard_of(parameter)
        return self.grid.at.tp == 0 or (shard is not None and shard.size > 1)

    def _partitions(self) -> Iterator[Partition]:
        zero = self.zero
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            return (self._sub_group(zero, number) for number in range(len(zero.fp16_groups)))
        if isinstance(zero, DeepSpeedZeroOptimizer):
            return map(_flat_group, zero.bit16_groups, zero.single_partition_of_fp32_groups)
        if isinstance(zero, BF16_Optimizer):
            return map(_flat_group, zero.bf16_groups, zero.fp32_groups_flat_partition)
        if isinstance(zero, MasterWeights):
            return (_whole(parameter, master) for parameter, master in zero.pairs)
        return (_whole(parameter, parameter) for group in zero.param_groups for parameter in group["params"])

    def _sub_group(self, zero: DeepSpeedZeroOptimizer_Stage3, number: int) -> Partition:
        swapped = zero._swappable_optimizer_subgroup(number)
        fragments = []
        for parameter in zero.fp16_groups[number]:
            _, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            first = length * zero._get_param_partition_rank(parameter)
            count = max(0, min(length, parameter.ds_numel - first))
            fragments.append(Fragment(parameter, first, offset, count))

        def write_back() -> None:
            zero._reassign_or_swap_out_partitioned_parameters(number)
            if swapped:
                zero._optimizer_states_and_gradient_swap_out(number)

        def master() -> torch.Tensor:
            return zero.fp32_partitioned_groups_flat[number]

        dtype = zero.fp32_partitioned_groups_flat[number].dtype
        if not swapped:
            return Partition(tuple(fragments), master, dtype, write_back=write_back)
        read_in = partial(zero._optimizer_states_and_gradient_swap_in, number)
        release = partial(zero._release_swap_buffers, number)
        return Partition(tuple(fragments), master, dtype, read_in, release, write_back)


def _flat_group(parameters: list[torch.nn.Parameter], master: torch.Tensor) -> Partition:
    """Of ZeRO 1 and 2: this rank's part of a group's flat master weights."""
    fragments = []
    for parameter in parameters:
        if (mapping := parameter._hp_mapping) is not None:  # type: ignore[attr-defined]
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            fragments.append(Fragment(parameter, there.start, here.start, here.numel))
    return Partition(tuple(fragments), lambda: master, master.dtype)


def _whole(parameter: torch.nn.Parameter, master: torch.Tensor) -> Partition:
    return Partition((Fragment(parameter, 0, 0, parameter.numel()),), lambda: master, master.dtype)
