"""LAMB (You et al. 2019, arXiv 1904.00962) in torch; DeepSpeed 0.19.8 has only a CUDA kernel.

DeepSpeed's `FusedLamb` has no kernel for a CPU, and takes the norm of a tensor-parallel rank's part of a
weight for the norm of the weight. ZeRO refuses it, since its flat shards know no parameters. `Lamb` runs on
every device, takes norms over the tensor-parallel ranks, and steps whole parameters, so that it too needs
ZeRO-0. Upstream: no issue found. Worth another look when
    `test_lamb.py::test_deepspeed_has_lamb_for_cuda_alone` fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter

from launch.deepspeed_fixes.norms import squared_norm
from modeling.parallel.process_grid import ProcessGrid

# bounds of the trust ratio, as in DeepSpeed's FusedLamb
LEAST = 0.01
MOST = 10.0


class Lamb(torch.optim.AdamW):
    """AdamW's direction, scaled by the rate and each parameter's trust ratio |weights| / |direction|.

    Algorithm 2 of the paper with bias correction, and decay inside the direction. States are AdamW's: step
    and two moments of each parameter, in fp32.
    """

    def __init__(self, parameters: Iterable[dict[str, Any]], grid: ProcessGrid, **numbers: Any) -> None:
        """Take this rank's groups of `parameters`; `numbers`: lr, betas, eps, weight_decay."""
        super().__init__(parameters, foreach=False, fused=False, **numbers)
        self.grid = grid
        # By position: the master weights, which replace the parameters later, know no shards.
        self.shared = []
        for group in self.param_groups:
            self.shared.append([is_model_parallel_parameter(each) for each in group["params"]])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Collective over the tensor-parallel ranks."""
        assert closure is None, "DeepSpeed computes the loss before"
        updates = []
        for group, marks in zip(self.param_groups, self.shared, strict=True):
            for parameter, shared in zip(group["params"], marks, strict=True):
                if parameter.grad is not None:
                    direction = self._direction(parameter, group)
                    updates.append((parameter, direction, group["lr"], shared))
        for (parameter, direction, lr, _), ratio in zip(updates, self._trust_ratios(updates), strict=True):
            parameter.addcmul_(direction, (lr * ratio).to(parameter.dtype), value=-1)

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            zeros = (torch.zeros_like(parameter) for _ in range(2))
            state.update(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True), step=torch.tensor(0.0))
        assert parameter.grad is not None
        state["step"] += 1
        step = int(state["step"])
        first = state["exp_avg"]
        second = state["exp_avg_sq"]
        first.lerp_(parameter.grad, 1 - beta1)
        second.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return (first / (1 - beta1**step)).div_(root).add_(parameter, alpha=group["weight_decay"])

    def _trust_ratios(self, updates: list[tuple[torch.Tensor, torch.Tensor, float, bool]]) -> torch.Tensor:
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
        ratios = (weights / directions).clamp(LEAST, MOST)
        return torch.where((weights > 0) & (directions > 0), ratios, torch.ones_like(ratios))
