"""Weights and moments, read whole from whatever shards them over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

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
        while hasattr(optimizer, "optimizer"):
            self._wrappers.append(optimizer)
            optimizer = optimizer.optimizer
        self._optimizer = optimizer
        self._before = Tensors()

    def weights(self) -> Tensors:
        """Return the weights, and the buffers that have numbers."""
        return {name: weight_of(each).clone() for name, each in self._tensors.items()}

    def after_step(self) -> dict[str, Tensors]:
        """Return gradients, moments, weights by kind, gradients in the order in which they are made.

        The gradients are those of the step, after clipping: the first moment is a mean of theirs, under
        any sharding.
        """
        read = self.moments()
        gradients = Tensors()
        for moment in SHARES.keys() & read.keys():
            for name, mean in reversed(read[moment].items()):
                kept, new = self.shares(moment, name)
                before = self._before.get(name, 0.0)
                gradients[name] = (mean - kept * before) / new
        self.keep(read)
        return {"gradient": gradients, **read, "weight": self.weights()}

    def shares(self, moment: str, name: str) -> tuple[float, float]:
        """Return what a tensor's first moment keeps of itself, and takes of a step's gradient."""
        return SHARES[moment](self._optimizer.param_groups[0])

    def keep(self, moments: Mapping[str, Tensors]) -> None:
        """Keep the moments from which the next step's gradients are told."""
        for moment in SHARES.keys() & moments.keys():
            self._before = {
                name: each.clone() for name, each in moments[moment].items()
            }

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
            found |= {name for name, each in state.items() if _has_dims(each)}
        return {moment: dict(self._of_moment(moment)) for moment in sorted(found)}

    def _of_moment(self, moment: str) -> Iterator[tuple[str, Tensor]]:
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, parameter in self._tensors.items():
            tensor = self._optimizer.state.get(parameter, {}).get(moment)
            if tensor is None and _is_partitioned(parameter):
                tensor = safe_get_full_optimizer_state(parameter, moment)
            if tensor is not None:
                yield name, whole(tensor)
            elif parameter.requires_grad:
                self.unread.add(f"{moment} of {name}")


def weight_of(parameter: Tensor) -> Tensor:
    """Return a parameter's numbers, those that the optimizer steps where it has a copy of its own."""
    from deepspeed.utils import safe_get_full_fp32_param

    own = None
    if _is_partitioned(parameter):
        own = safe_get_full_fp32_param(parameter)
    return whole(parameter.detach() if own is None else own)


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor's numbers from all ranks, and any other tensor as it is."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach()


def _is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")


def _has_dims(value: object) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _of_adam(group: Mapping[str, Any]) -> tuple[float, float]:
    beta = group["betas"][0]
    return beta, 1 - beta


def _of_momentum(group: Mapping[str, Any]) -> tuple[float, float]:
    return group["momentum"], 1.0


# what a first moment keeps of itself, and takes of a step's gradient
SHARES = {"exp_avg": _of_adam, "momentum_buffer": _of_momentum}
