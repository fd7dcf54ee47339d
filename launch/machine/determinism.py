"""Deterministic kernels, so that a GPU computes the same bits in every run."""

from __future__ import annotations

import os

# cuBLAS and NCCL read them when they start. cuBLAS promises equal results only with this workspace
# (https://docs.nvidia.com/cuda/cublas, "Results reproducibility"); a ring has one order of summation.
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def demand_determinism() -> None:
    """Make torch use only deterministic kernels; an operation without one will raise RuntimeError.

    Call it before the device is used. Variables set by the user stay.
    """
    import torch

    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)  # with warn_only, attention's backward pass would not be
    # Our code reads no unwritten memory, and filling all memory first takes longer than the step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
