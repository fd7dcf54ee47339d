"""Kernels that add up in one order, so that a GPU computes the same bits in every run."""

from __future__ import annotations

import os

# cuBLAS and NCCL read them when they start. Only with this workspace does cuBLAS promise equal results
# (https://docs.nvidia.com/cuda/cublas, "Results reproducibility"); a ring has one order of summation.
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def demand_determinism() -> None:
    """Have torch use deterministic kernels only, and raise RuntimeError where there is none.

    To be called before the device is used. Variables that the user has set stay.
    """
    import torch

    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Ours reads no memory that it has not written, and filling all of it first takes longer than the step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
