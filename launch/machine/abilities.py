"""What this machine can do: precisions of its accelerator, compilers, libraries."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from ds_configs.plan import Machine


def emulate_fp16() -> None:
    """Let any CPU run fp16, so that the loss scaler can be exercised without a GPU.

    Has to precede `import deepspeed`.

    DeepSpeed refuses fp16 on CPUs without instructions for it
    (https://github.com/deepspeedai/DeepSpeed/pull/7207), though torch computes in it on all. Slow (a 1024^3
    matrix product takes about 150 times as long as in fp32) and named in the results as a deviation.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if get_accelerator().device_name() != "cpu":
        return

    class EmulatedFp16(CPU_Accelerator):
        def is_fp16_supported(self) -> bool:
            return True

    set_accelerator(EmulatedFp16())


def detect_machine(emulated_fp16: bool = False) -> Machine:
    """What this process's accelerator and operating system offer.

    Imports deepspeed's accelerator, starts nothing.
    """
    if emulated_fp16:
        emulate_fp16()
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    emulated = emulated_fp16 and accelerator.device_name() == "cpu"
    return Machine(
        accelerator=accelerator.device_name(),
        fp16=bool(accelerator.is_fp16_supported()),
        bf16=_has_bf16(accelerator),
        compiler=_can_compile(),
        cuda_compiler=accelerator.device_name() != "cuda" or _has_nvcc(),
        libaio=ctypes.util.find_library("aio") is not None,
        emulated_fp16=emulated,
    )


def _has_bf16(accelerator: Any) -> bool:
    """Whether bf16 is in hardware: DeepSpeed also counts the slow emulation of cards before Ampere."""
    if accelerator.device_name() != "cuda":
        return bool(accelerator.is_bf16_supported())
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def _has_nvcc() -> bool:
    from torch.utils.cpp_extension import CUDA_HOME

    return CUDA_HOME is not None and Path(CUDA_HOME, "bin", "nvcc").exists()


def _can_compile() -> bool:
    """Whether DeepSpeed's ops can be built: there are torch's C++ compiler, ninja, and Python's headers."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return bool(
        shutil.which(os.environ.get("CXX", "c++"))
        and (shutil.which("ninja") or _ninja_module())
        and headers.exists()
    )


def _ninja_module() -> bool:
    """The ninja wheel puts its program next to the interpreter, which need not be on PATH: add it."""
    folder = os.path.dirname(sys.executable)
    if not os.path.exists(os.path.join(folder, "ninja")):
        return False
    os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")
    return True
