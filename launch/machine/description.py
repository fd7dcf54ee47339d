"""This machine and its software: what accelerator and system can do, versions, commit of the checkout."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_configs.plan import Machine
from ds_configs.sections import monitors
from launch.deepspeed_fixes.versions import refuse_others
from launch.ranks import processes
from recipes.problems import counted

PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "datasets",
    "accelerate",
    "tokenizers",
    "numpy",
)
REPOSITORY = Path(__file__).resolve().parents[2]


def describe(repository: Path = REPOSITORY) -> dict[str, Any]:
    """Describe machine, versions and commit; memory in units of 1e9 bytes, of one accelerator.

    Only cores that this process may use are counted (containers and taskset allow fewer than the machine
    has), and accelerators that it sees on this node.
    """
    seen = gpus()
    cuda = None
    nccl = None
    if seen:
        import torch

        cuda = torch.version.cuda
        if cuda and torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gb": round(physical_memory() / 1e9, 1),
        "accelerator": seen[0].name if seen else "cpu",
        "accelerators": len(seen),
        "accelerator_memory_gb": round(seen[0].total / 1e9, 1) if seen else None,
        "cuda": cuda,
        "nccl": nccl,
        "driver": driver() if cuda else None,
        "links": links() if cuda else None,
        "versions": versions(),
        "git": git_state(repository),
    }


def summary(described: Mapping[str, Any]) -> str:
    """Name the hardware in short: "1 x NVIDIA H100", or "CPU: AMD EPYC, 2 cores"."""
    if described["accelerators"]:
        return f"{described['accelerators']} x {described['accelerator']}"
    return f"CPU: {described['cpu']}, {counted(described['cores'], 'core')}"


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that decide numbers; None: not installed."""
    return {
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
    }


def installed(package: str) -> str | None:
    """Return the version of a package; None: not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(repository: Path) -> dict[str, Any] | None:
    """Return the commit of the checkout, and if files differ from it; None if `repository` is not its top.

    A package in a virtual environment inside another checkout must not report that one.
    """
    git = ("git", "-C", str(repository))
    top, _, commit = (
        _output(*git, "rev-parse", "--show-toplevel", "HEAD") or ""
    ).rpartition("\n")
    if not top or Path(top).resolve() != repository.resolve():
        return None
    status = _output(*git, "status", "--porcelain")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def driver() -> str | None:
    """Return the version of NVIDIA's driver."""
    told = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return told.splitlines()[0] if told else None


def links() -> list[str] | None:
    """Return the kinds of links between this node's GPUs, in nvidia-smi's words: NV12, PIX, SYS."""
    told = _output("nvidia-smi", "topo", "-m")
    rows = [
        line
        for line in (told or "").splitlines()
        if re.match(r"\W*(\[\d+m)?GPU\d+\s+.*\bX\b", line)
    ]
    kinds = {
        word for row in rows for word in row.split()[1 : len(rows) + 1] if word != "X"
    }
    return sorted(kinds) if told else None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_model() -> str:
    """Return the processor's marketing name, if the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    """Return a program's output; None if it fails, hangs or is missing: a run never depends on it."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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

    class EmulatedFp16(CPU_Accelerator):  # type: ignore[misc]  # has no types
        def is_fp16_supported(self) -> bool:
            return True

    set_accelerator(EmulatedFp16())


def detect_machine(emulated_fp16: bool = False, *, on_paper: bool = False) -> Machine:
    """Return the abilities of this process's accelerator and system, from DeepSpeed and torch.

    `on_paper`: for a plan, without torch where cores train. Raises ProblemsError for a DeepSpeed that is older
    than all that were seen to train.
    """
    if not on_paper:
        refuse_others()
    if emulated_fp16:
        emulate_fp16()
    device = processes.device()
    known = None if device.own_memory else halves_of_cores()
    if on_paper and known and not emulated_fp16:
        fp16 = known[0]
        bf16 = True
    else:
        from deepspeed.accelerator import get_accelerator

        fp16 = bool(get_accelerator().is_fp16_supported())
        bf16 = bool(get_accelerator().is_bf16_supported())
    slow_bf16 = bool(known and not known[1])
    if not device.own_memory and not known:
        import torch

        # Without instructions for it and without AVX-512 torch's own loop multiplies: 0.85 GFLOP/s for 1024^3
        # on one core with AVX2, where fp32 has 59.
        slow_bf16 = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    cuda_compiler = True
    if device.name == "cuda":
        import torch
        from torch.utils.cpp_extension import CUDA_HOME

        # In hardware: DeepSpeed also counts the slow emulation of cards before Ampere.
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        nvcc = CUDA_HOME is not None and Path(CUDA_HOME, "bin", "nvcc").exists()
        cuda_compiler = nvcc or torch.version.cuda is None  # AMD's GPUs
    packages = monitors.PACKAGES
    return Machine(
        device,
        fp16,
        bf16,
        compiler=not missing_for_compiling(),
        libaio=ctypes.util.find_library("aio") is not None,
        cuda_compiler=cuda_compiler,
        lacks=frozenset(name for name in packages if find_spec(name) is None),
        slow_bf16=slow_bf16,
        emulated_fp16=emulated_fp16 and not device.own_memory,
    )


def halves_of_cores(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[bool, bool] | None:
    """Return whether x86 cores have instructions for products in fp16 and in bf16; None: torch knows.

    oneDNN, torch's library, also multiplies in bf16 by AVX-512's for fp32, at a fifth of fp32's rate: 61
    GFLOP/s for 1024^3 on two cores where fp32 has 315.
    """
    if not cpuinfo.exists():
        return None
    listed = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.M)
    if not listed:
        return None
    flags = set(listed[1].split())
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
    seen = []
    for number in range(count):
        facts = module.get_device_properties(number)
        capability = (
            (facts.major, facts.minor)
            if torch.version.cuda and hasattr(facts, "major")
            else None
        )
        free = module.mem_get_info(number)[0] if with_free else 0
        seen.append(
            VisibleGpu(facts.name, capability, float(facts.total_memory), float(free))
        )
    return seen


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
