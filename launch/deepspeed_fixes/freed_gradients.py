"""ZeRO-2 frees a gradient larger than the bucket while another stream still reduces it.

DeepSpeed 0.19.8, and by their code 0.18.9 to 0.19.7, `runtime/zero/stage_1_and_2.py`: with overlap_comm,
`average_tensor` reduces such a gradient in place on the reduction stream, and `clear_grad_attribute` drops it
at once on each rank that owns no part of it. The allocator gives its memory to the backward pass, which
overwrites what the reduction has not read yet, or is overwritten by it. DeepSpeed calls `record_stream` for
an offloaded optimizer only.
Upstream: https://github.com/deepspeedai/DeepSpeed/pull/7965 mended the same for the ranks that own the
    gradient; no issue found for the others. No longer needed when
    `test_buckets.py::test_deepspeed_alone_frees_gradients_that_are_being_reduced` fails.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from launch.deepspeed_fixes import versions


def keep_while_reduced(optimizer: Any) -> None:
    """Have the allocator wait for the reduction before it reuses the memory of a large gradient."""
    if not isinstance(optimizer, DeepSpeedZeroOptimizer) or not optimizer.overlap_comm:
        return
    if get_accelerator().resolves_data_dependency():
        return
    if not versions.at_least("0.19.8"):
        # No method there is called for it: under ZeRO-2 nothing computes while gradients are reduced.
        parameters = itertools.chain(*optimizer.bit16_groups)
        largest = max(each.numel() for each in parameters)
        if optimizer.partition_gradients and largest > optimizer.reduce_bucket_size:
            optimizer.overlap_comm = False
        return
    if optimizer._offload_gradient_safety_enabled:
        return

    def record(tensor: torch.Tensor, stream: torch.Stream) -> None:
        if tensor.numel() > optimizer.reduce_bucket_size:
            tensor.record_stream(stream)

    optimizer._record_gradient_stream = record
