"""LAMB (You et al. 2019, arXiv 1904.00962) in torch, and Adam without bias correction, its direction.

DeepSpeed 0.19.8 has only a CUDA kernel for LAMB, and compiles the Adam that can do without.

DeepSpeed's `FusedLamb` has no kernel for a CPU, and takes the norm of a tensor-parallel rank's part of a
weight for the norm of the weight. ZeRO refuses it, since its flat shards know no parameters. `Lamb` runs on
every device, takes norms over the tensor-parallel ranks, and steps whole parameters, so that it too needs
ZeRO-0. Upstream: no issue found. Worth another look when
    `test_lamb.py::test_deepspeed_has_lamb_for_cuda_alone` fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from launch.deepspeed_fixes.norms import squared_norm
from modeling.parallel.process_grid import ProcessGrid


class Adam(torch.optim.AdamW):
    """AdamW with or without bias correction; DeepSpeed's, which can do without, are compiled.

    States are torch's: step and two moments of each parameter, in fp32.
    """

    def __init__(
        self,
        parameters: Iterable[dict[str, Any]],
        *,
        bias_correction: bool = True,
        **numbers: Any,
    ) -> None:
        """Take groups of `parameters`; `numbers`: lr, betas, eps, weight_decay."""
        super().__init__(parameters, foreach=False, fused=False, **numbers)
        self.bias_correction = bias_correction

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None, "DeepSpeed computes the loss before"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    first, root = self._moments(parameter, group)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.addcdiv_(first, root, value=-group["lr"])

    def _moments(
        self, parameter: torch.Tensor, group: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring the moments up to date; return the first, and the root of the second with eps."""
        state = self.state[parameter]
        beta1, beta2 = group["betas"]
        if not self.bias_correction:
            # As DeepSpeed's kernels hold them: 1 - 0.999 is off by 1e-5, which a correction would cancel.
            beta1, beta2 = torch.tensor(group["betas"], dtype=torch.float32).tolist()
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["step"] += 1
        # 1 - beta^step of an endless number of steps is 1.
        step = int(state["step"]) if self.bias_correction else math.inf
        first = state["exp_avg"]
        second = state["exp_avg_sq"]
        first.mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return first / (1 - beta1**step), root


class Lamb(Adam):
    """AdamW's direction, scaled by the rate and each parameter's trust ratio |weights| / |direction|.

    Algorithm 2 of the paper, with decay inside the direction; `min_coeff` and `max_coeff` bound the ratio.
    """

    def __init__(
        self,
        parameters: Iterable[dict[str, Any]],
        grid: ProcessGrid,
        *,
        min_coeff: float = 0.01,
        max_coeff: float = 10.0,
        **numbers: Any,
    ) -> None:
        """Take this rank's groups of `parameters`; `numbers`: those of `Adam`."""
        super().__init__(parameters, **numbers)
        self.grid = grid
        self.bounds = (min_coeff, max_coeff)
        # By position: the master weights, which replace the parameters later, know no shards.
        self.shared: list[bool] = []
        for group in self.param_groups:
            self.shared += map(is_model_parallel_parameter, group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective over the tensor-parallel ranks."""
        assert closure is None, "DeepSpeed computes the loss before"
        updates = []
        marks = iter(self.shared)
        for group in self.param_groups:
            for parameter in group["params"]:
                shared = next(marks)
                if parameter.grad is not None:
                    direction = self._direction(parameter, group)
                    updates.append((parameter, direction, group["lr"], shared))
        for (parameter, direction, lr, _), ratio in zip(
            updates, self._trust_ratios(updates), strict=True
        ):
            parameter.addcmul_(direction, (lr * ratio).to(parameter.dtype), value=-1)

    def _direction(
        self, parameter: torch.Tensor, group: dict[str, Any]
    ) -> torch.Tensor:
        first, root = self._moments(parameter, group)
        return first.div_(root).add_(parameter, alpha=group["weight_decay"])

    def _trust_ratios(
        self, updates: list[tuple[torch.Tensor, torch.Tensor, float, bool]]
    ) -> torch.Tensor:
        """Return |weights| / |direction| of every parameter; 1 if either is 0. Collective."""
        # Duplicated parameters are equal on all tensor-parallel ranks and count once.
        first = self.grid.get_model_parallel_rank() == 0
        pairs = []
        for parameter, direction, _, shared in updates:
            pair = torch.stack([squared_norm(parameter), squared_norm(direction)])
            pairs.append(pair * (shared or first))
        squares = torch.stack(pairs)
        if self.grid.get_model_parallel_world_size() > 1:
            dist.all_reduce(squares, group=self.grid.get_model_parallel_group())
        weights, directions = squares.sqrt().unbind(dim=1)
        ratios = (weights / directions).clamp(*self.bounds)
        return torch.where(
            (weights > 0) & (directions > 0), ratios, torch.ones_like(ratios)
        )
