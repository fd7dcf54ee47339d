"""Weights and moments, read whole from whatever shards them over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from launch.deepspeed_fixes.round_robin import link_in_order

Tensors = dict[str, Tensor]


class Reading:
    """Reads what is trained, after each step. Collective where parameters are sharded.

    Known are tensors of torch, DTensors (FSDP2, torch's tensor parallelism), and the parameters of
    DeepSpeed's engine under ZeRO 0 to 3.

    Attributes:
        unread: moments that the optimizer does not show.
    """

    def __init__(self, tensors: Mapping[str, Tensor], optimizer: Any = None) -> None:
        self.unread = set[str]()
        self._tensors = tensors
        self._wrappers = []
        self._copies = dict[Tensor, Tensor]()
        while hasattr(optimizer, "optimizer"):
            self._wrappers.append(optimizer)
            if getattr(optimizer, "round_robin_gradients", False):
                link_in_order(optimizer)
            self._copies.update(_copies(optimizer))
            optimizer = optimizer.optimizer
        self._optimizer = optimizer
        self._moments = dict[str, Tensors]()

    def weights(self) -> Tensors:
        """Return the weights, and the buffers that have numbers."""
        return {name: whole(self._own(each)) for name, each in self._tensors.items()}

    def after_step(self) -> dict[str, Tensors]:
        """Return gradients, moments, weights by kind, gradients in the order in which they are made.

        The gradients are those of the step, after clipping: the first moment is a mean of theirs, under
        any sharding.
        """
        before = self._moments
        read = self.moments()
        gradients = Tensors()
        for moment in SHARES.keys() & read.keys():
            for name, mean in reversed(read[moment].items()):
                kept, new = self.shares(moment, name)
                earlier = before.get(moment, {}).get(name, 0.0)
                gradients[name] = (mean - kept * earlier) / new
        return {"gradient": gradients, **read, "weight": self.weights()}

    def shares(self, moment: str, name: str) -> tuple[float, float]:
        """Return what a tensor's first moment keeps of itself, and takes of a step's gradient."""
        kept, new = SHARES[moment](self._optimizer.param_groups[0])
        return kept, new

    def moments(self) -> dict[str, Tensors]:
        """Return the moments by kind; none before the first step. A gradient is told from those read last."""
        for each in self._wrappers:
            if hasattr(each, "_lazy_init_hp_params_optimizer_state"):
                # DeepSpeed does that once, after the first step of the first group of parameters: also in a
                # run that has loaded moments, and without those of the other groups
                each._hp_optimizer_states_linked = False
                each._lazy_init_hp_params_optimizer_state()
        found = set[str]()
        for state in self._optimizer.state.values() if self._optimizer else ():
            found |= {name for name in state if getattr(state[name], "shape", ())}
        self._moments = {each: dict(self._of_moment(each)) for each in sorted(found)}
        return self._moments

    def _of_moment(self, moment: str) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._tensors.items():
            tensor = self._own(parameter, moment)
            if tensor is not None:
                yield name, whole(tensor)
            elif parameter.requires_grad:
                self.unread.add(f"{moment} of {name}")

    def _own(self, parameter: Tensor, moment: str = "") -> Any:
        """Return a parameter's moment, or the numbers that are stepped; None: there is no such moment."""
        own = copy = self._copies.get(parameter, parameter)
        if moment:
            own = self._optimizer.state.get(copy, {}).get(moment)
        if own is not None and copy.shape != parameter.shape:
            # of one copy of a whole group, in which parameters lie as in their own memory
            start = parameter.storage_offset()
            return own[start : start + parameter.numel()].view_as(parameter)
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            from deepspeed.utils import safe_get_full_optimizer_state

            return safe_get_full_optimizer_state(parameter, moment or None)
        return own


def _copies(wrapper: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the parameters in bf16 with the fp32 copies that are stepped."""
    for parameters, stepped in COPIES:
        groups = getattr(wrapper, parameters, ())
        copies = getattr(wrapper, stepped, ())
        for group, copy in zip(groups, copies, strict=False):
            own = [copy] * len(group) if torch.is_tensor(copy) else copy
            yield from zip(group, own, strict=True)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, of a DTensor with the numbers of all ranks."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach().clone()


# what a first moment keeps of itself, and takes of a step's gradient
SHARES: dict[str, Any] = {
    "exp_avg": lambda group: (group["betas"][0], 1 - group["betas"][0]),
    "momentum_buffer": lambda group: (group["momentum"], 1.0),
}
# attributes of optimizers: parameters, and the copies that are stepped (DeepSpeed under ZeRO 0, Megatron-Core)
COPIES = (
    ("fp16_groups", "fp32_groups"),
    ("fp16_groups", "fp32_groups_flat"),
    ("float16_groups", "fp32_from_float16_groups"),
)
