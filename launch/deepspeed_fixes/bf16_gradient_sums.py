"""DeepSpeed's BF16_Optimizer clips by too small a norm on a CPU, and averages one rank's gradients.

BF16_Optimizer runs ZeRO-1 in bf16 with gradient sums in fp32 (`data_types.grad_accum_dtype`), plain and in a
pipeline. DeepSpeed 0.19.8, `get_global_norm_of_tensors` of `runtime/utils.py`, adds up the squares of a whole
gradient in float32. On a CPU torch does this with too few partial sums, and an embedding's norm comes out too
small (launch/deepspeed_fixes/zero0.py has the figures). Also, `allreduce_bucket` of `runtime/engine.py`
copies all gradients, rounds them to `communication_data_type` and copies them back even for a single rank.
Upstream: https://github.com/pytorch/pytorch/issues/169237 (torch's norm); no issue found for the copies.
No longer needed when `test_upstream_symptoms.py::test_the_norm_of_bf16_sums_is_added_up_in_float32` fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from launch.deepspeed_fixes.norms import sum_of_squares
from modeling.parallel.process_grid import ProcessGrid


def mend_bf16_sums(engine: DeepSpeedEngine, grid: ProcessGrid) -> None:
    """Give an engine with BF16_Optimizer the norm of the other stages; skip averaging on one rank."""
    if not isinstance(engine.optimizer, bf16_optimizer.BF16_Optimizer):
        return
    bf16_optimizer.get_global_norm_of_tensors = norm_of_tensors
    if grid.dp == 1 and isinstance(engine, PipelineEngine):
        engine.pipeline_enable_backward_allreduce = False
    elif grid.dp == 1:
        engine.enable_backward_allreduce = False


def norm_of_tensors(input_tensors: Iterable[torch.Tensor], mpu: Any = None, **_: Any) -> torch.Tensor:
    """Replace DeepSpeed's `get_global_norm_of_tensors` by sums in float64; return an fp32 scalar."""
    total = sum_of_squares(list(input_tensors))
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        dist.all_reduce(total, group=mpu.get_model_parallel_group())
    return total.sqrt().float()
