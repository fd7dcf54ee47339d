"""What the resolver has to know of the machine; found out by `launch`, which may import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A machine's abilities.

    Attributes:
        accelerator: "cpu" or "cuda".
        fp16, bf16: the accelerator trains in it.
        compiler: DeepSpeed can compile its ops (g++ and ninja).
        cuda_compiler: it can compile CUDA ops as well (nvcc); true where there is no CUDA.
        libaio: library and headers for DeepSpeed's NVMe op.
        emulated_fp16: fp16 on an accelerator that refuses it, switched on by the user, for tests of the loss scaler.
    """

    accelerator: str
    fp16: bool
    bf16: bool
    compiler: bool
    libaio: bool
    emulated_fp16: bool = False
    cuda_compiler: bool = True
