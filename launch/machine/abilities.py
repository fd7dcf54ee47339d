"""Abilities of this machine: precisions of its accelerator, compilers, libraries."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ds_configs.plan import HOST, Device, Machine
from ds_configs.sections.monitors import PACKAGES
from launch.deepspeed_fixes import versions
from launch.ranks import processes


def emulate_fp16() -> None:
    """Let any CPU run fp16, to exercise the loss scaler without a GPU. Call it before `import deepspeed`.

    DeepSpeed refuses fp16 on CPUs without instructions for it
    (https://github.com/deepspeedai/DeepSpeed/pull/7207), though torch computes in it on every CPU. It is slow
    (a 1024^3 matrix product takes about 150 times as long as in fp32), and results name it as a deviation.
    """
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if processes.device().own_memory:
        return

    class EmulatedFp16(CPU_Accelerator):
        def is_fp16_supported(self) -> bool:
            return True

    set_accelerator(EmulatedFp16())


def detect_machine(emulated_fp16: bool = False, *, on_paper: bool = False) -> Machine:
    """Return the abilities of this process's accelerator and system, from DeepSpeed and torch.

    `on_paper`: for a plan, without torch where cores train. Raises ProblemsError for a DeepSpeed that is older
    than all that were seen to train.
    """
    if not on_paper:
        versions.refuse_others()
    if emulated_fp16:
        emulate_fp16()
    elif on_paper and processes.device() == HOST and (known := halves_of_cores()):
        return _with_system(HOST, known[0], True, True, slow_bf16=not known[1])
    from deepspeed.accelerator import get_accelerator

    device = processes.device()
    bf16 = get_accelerator().is_bf16_supported()
    cuda_compiler = True
    if device.name == "cuda":
        import torch
        from torch.utils.cpp_extension import CUDA_HOME

        # In hardware: DeepSpeed also counts the slow emulation of cards before Ampere.
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        nvcc = CUDA_HOME is not None and Path(CUDA_HOME, "bin", "nvcc").exists()
        cuda_compiler = nvcc or torch.version.cuda is None  # AMD's GPUs
    return _with_system(
        device,
        bool(get_accelerator().is_fp16_supported()),
        bool(bf16),
        cuda_compiler,
        slow_bf16=not device.own_memory and not _has_bf16_products(),
        emulated_fp16=emulated_fp16 and not device.own_memory,
    )


def _with_system(
    device: Device, fp16: bool, bf16: bool, cuda_compiler: bool, **more: bool
) -> Machine:
    """Add what the system has besides the device: compiler, libaio, packages."""
    aio = ctypes.util.find_library("aio") is not None
    lacks = frozenset(
        name for name in PACKAGES.values() if importlib.util.find_spec(name) is None
    )
    compiler = not missing_for_compiling()
    return Machine(
        device,
        fp16,
        bf16,
        compiler,
        libaio=aio,
        cuda_compiler=cuda_compiler,
        lacks=lacks,
        **more,
    )


def halves_of_cores(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[bool, bool] | None:
    """Return whether x86 cores have instructions for products in fp16 and in bf16; None: torch knows.

    oneDNN, torch's library, also multiplies in bf16 by AVX-512's for fp32, at a fifth of fp32's rate: 61
    GFLOP/s for 1024^3 on two cores where fp32 has 315.
    """
    if not cpuinfo.exists():
        return None
    found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.M)
    if not found:
        return None
    flags = set(found[1].split())
    both = "avx_ne_convert" in flags
    return both or "avx512_fp16" in flags, both or not flags.isdisjoint(
        {"avx512_bf16", "amx_bf16"}
    )


@dataclass(frozen=True)
class VisibleGpu:
    """A visible GPU: name, total and free bytes (0: not read), compute capability (None: not NVIDIA's)."""

    name: str
    capability: tuple[int, int] | None
    total: float
    free: float


def gpus(with_free: bool = False) -> list[VisibleGpu]:
    """List the GPUs that this process sees; none where it trains on a CPU.

    `with_free`: with free memory, which needs a context on each GPU, and time.
    """
    count = processes.device_limit()
    if not count:
        return []
    import torch

    module = processes.device_module()
    found = []
    for number in range(count):
        facts = module.get_device_properties(number)
        capability = (
            (facts.major, facts.minor)
            if torch.version.cuda and hasattr(facts, "major")
            else None
        )
        free = module.mem_get_info(number)[0] if with_free else 0
        found.append(
            VisibleGpu(facts.name, capability, float(facts.total_memory), float(free))
        )
    return found


def _has_bf16_products() -> bool:
    """Check that this machine's cores have instructions for products in bf16.

    Without them and without AVX-512 torch's own loop multiplies: 0.85 GFLOP/s for 1024^3 on one core with
    AVX2, where fp32 has 59.
    """
    import torch

    known = halves_of_cores()
    return known[1] if known else bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def missing_for_compiling() -> list[str]:
    """List the missing tools for DeepSpeed's ops: torch's C++ compiler, ninja, Python's headers."""
    folder = os.path.dirname(sys.executable)
    if not shutil.which("ninja") and os.path.exists(os.path.join(folder, "ninja")):
        # The ninja wheel puts its program next to the interpreter, which need not be on PATH.
        os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")
    programs = (os.environ.get("CXX", "c++"), "ninja")
    missing = [program for program in programs if not shutil.which(program)]
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return missing if headers else [*missing, "Python.h"]
