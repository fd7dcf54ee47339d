"""Lion (Chen et al. 2023, arXiv 2302.06675) in torch; DeepSpeed 0.19.8 moves what has no gradient.

DeepSpeed has Lion as a CUDA kernel and as a compiled CPU op for an offloaded optimizer. The latter takes the
sign of 0 for 1 (csrc/lion/cpu_lion_impl.cpp, `copysignf`), so that positions that no sample reaches walk away
by the learning rate in each step, and keeps a second moment that it never reads. Upstream: no issue found.
Worth another look when `test_lion.py::test_deepspeeds_moves_what_has_no_gradient` fails.
"""

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, element by element, so that ZeRO may shard parameters and their momentum."""

    def __init__(self, parameters: Any, **numbers: Any) -> None:
        super().__init__(parameters, numbers)  # lr, betas, weight_decay; eps is not read

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; there is no closure."""
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in (each for each in group["params"] if each.grad is not None):
                if not (state := self.state[parameter]):
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(parameter))
                state["step"] += 1
                direction = state["exp_avg"].lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr)
                state["exp_avg"].lerp_(parameter.grad, 1 - beta2)
