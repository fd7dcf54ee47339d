"""ZeRO 1 and 2 cannot gather the weights that they have stepped.

DeepSpeed 0.18.9, `runtime/zero/stage_1_and_2.py`, mended in 0.19.0: the flat weights are made of parameters in
autograd's graph, and torch refuses to write into their parts ("Output 0 of Split is a view and is being
modified inplace") when ranks gather them.
No longer needed when 0.18.9 leaves `SEEN` of versions.py; `tests/workers/deepspeed_versions.py` notices.
"""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


def leave_out_of_graph() -> None:
    """Have the flat weights of every later optimizer made outside of autograd's graph."""
    flatten = DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned
    outside = torch.no_grad()(flatten)
    DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned = outside
