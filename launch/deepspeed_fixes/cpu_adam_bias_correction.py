"""DeepSpeed's CPU Adam computes its bias correction afresh after loading.

DeepSpeed 0.19.8, `csrc/includes/cpu_adam.h`: the compiled half multiplies beta^t in float32, step by step,
and keeps the products outside of the optimizer's state. After loading, the first step takes beta^t from `pow`
instead. After many roundings the two differ in the last bits, and so does a resumed run from an uninterrupted
one.
Upstream: no issue found; `pow` came with https://github.com/deepspeedai/DeepSpeed/pull/564. No longer needed
    when `test_cpu_adam_bias_correction.py::test_deepspeed_alone_does_not_resume_bit_for_bit` fails.
"""

from __future__ import annotations

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam


def replay_bias_correction(optimizer: DeepSpeedCPUAdam) -> None:
    """Restore the bias correction of DeepSpeed's CPU Adam by repeating its steps on one element."""
    steps = max(
        (int(state["step"]) for state in optimizer.state.values() if "step" in state),
        default=0,
    )
    parameter, gradient, first, second = (torch.zeros(1) for _ in range(4))
    group = optimizer.param_groups[0]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id,
            step,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
            parameter,
            gradient,
            first,
            second,
        )
