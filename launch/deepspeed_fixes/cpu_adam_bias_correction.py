"""DeepSpeed's CPU Adam computes the bias correction afresh after loading."""

from __future__ import annotations

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def replay_bias_correction(optimizer) -> None:
    """Bring DeepSpeed's CPU Adam to the exact bias correction of the uninterrupted run.

    Its compiled half multiplies beta^t up in float32, step by step, and keeps the product outside of the optimizer's state; after
    loading it would compute beta^t afresh, which differs in the last bits. One-element updates repeat the multiplications.
    """
    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    steps = max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)
    parameter, gradient, first, second = (torch.zeros(1) for _ in range(4))
    group = optimizer.param_groups[0]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, step, group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"],
            parameter, gradient, first, second,
        )  # fmt: skip
