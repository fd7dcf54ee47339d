"""Checks that a plan makes and a start does not: GPUs and their driver, and compilers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from launch.machine import description
from launch.machine.checks import Check, failed, ok, unchecked, warning
from launch.machine.description import cores, gpus, installed
from launch.ranks import processes
from recipes.problems import counted


def accelerator() -> Check:
    """Check the GPUs that torch sees, and their free memory."""
    seen = gpus(with_free=True)
    if not seen:
        return no_gpu()
    names = ", ".join(
        dict.fromkeys(f"{gpu.name} ({gpu.total / 1e9:.3g} GB)" for gpu in seen)
    )
    came = f"{counted(len(seen), 'GPU')}: {names}"
    if len({gpu.name for gpu in seen}) > 1:
        return warning(
            f"{came}: the slowest sets the pace",
            "choose equal ones: CUDA_VISIBLE_DEVICES",
        )
    taken = [
        str(number) for number, gpu in enumerate(seen) if gpu.free < 0.9 * gpu.total
    ]
    if taken:
        came += f"; of the memory of {', '.join(taken)} more than a tenth is taken"
        return warning(came, "look with nvidia-smi which process holds it")
    return ok(came)


def no_gpu() -> Check:
    """Warn if torch uses no GPU though the system shows one that nobody has hidden."""
    came = f"no GPU: {counted(cores(), 'core')} of the CPU"
    hidden = (
        os.environ.get("DS_ACCELERATOR") == "cpu"
        or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    )
    if hidden or not list(Path("/dev").glob("nvidia[0-9]*")):
        return ok(came)
    import torch

    why = "cannot use it (driver?)" if torch.version.cuda else "is a build for CPUs"
    return warning(
        f"{came}, though there is /dev/nvidia0: torch {torch.__version__} {why}",
        "install a CUDA build of torch, or hide them with CUDA_VISIBLE_DEVICES=",
    )


def compiler() -> Check:
    """Check for the C++ compiler of DeepSpeed's ops, ninja and headers."""
    missing = description.missing_for_compiling()
    if missing:
        slower = "torch's optimizer takes the place of DeepSpeed's compiled one, slower"
        return warning(
            f"no {', '.join(missing)}: {slower}",
            "apt-get install g++ ninja-build python3-dev (Debian, Ubuntu)",
        )
    return ok(f"{shutil.which(os.environ.get('CXX', 'c++'))}, ninja, Python's headers")


def fused_kernels() -> Check:
    """Compile a kernel and run it on the GPU, as dropout and the loss are compiled in every training."""
    if not gpus():
        return unchecked("no GPU")
    import torch

    from modeling import fusing

    failure = fusing.failure_of_kernels(torch.device(processes.device().name))
    if failure:
        slower = "nothing is compiled for the GPU, torch's own kernels run, slower"
        return warning(
            f"{failure}: {slower}", "apt-get install gcc python3-dev (Debian, Ubuntu)"
        )
    return ok("a kernel was compiled and has run")


def cuda_compiler() -> Check:
    """Check that nvcc has the major version of torch's CUDA: torch loads the ops that it compiles."""
    if not gpus():
        return unchecked("no GPU")
    wanted = torch_cuda()
    if wanted is None:
        return unchecked(f"torch {installed('torch')} has no CUDA")
    release = nvcc_version()
    if release is None:
        return warning(
            "no nvcc: no NVMe offload",
            f"install the CUDA toolkit {wanted} and set CUDA_HOME",
        )
    if release.split(".")[0] == wanted.split(".")[0]:
        return ok(f"nvcc {release}; torch has CUDA {wanted}")
    return failed(
        f"nvcc {release}, and torch has CUDA {wanted}: DeepSpeed's CUDA ops need the same major version",
        f"set CUDA_HOME to a CUDA toolkit {wanted}, or install torch for CUDA {release}",
    )


def torch_cuda() -> str | None:
    """Return torch's CUDA version, such as 13.0; None: a build for CPUs."""
    import torch

    return torch.version.cuda


def nvcc_version() -> str | None:
    """Return the version of torch's and DeepSpeed's nvcc, such as 12.6; None: there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    try:
        command = [str(Path(CUDA_HOME or "", "bin", "nvcc")), "--version"]
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=10
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    named = re.search(r"release (\d+\.\d+)", said)
    return named[1] if named else None
