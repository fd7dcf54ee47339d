"""Checks of kernels for the GPUs and of their shared memory, made at every start."""

from __future__ import annotations

import os
import platform
import re

from launch.machine.abilities import gpus
from launch.machine.checks import Check, failed, ok, unchecked, warning
from launch.machine.description import installed

# Bytes of /dev/shm. Docker gives 64 MB, in which NCCL failed on four GPUs: a segment of a connection has
# 9,637,888 bytes (https://github.com/NVIDIA/nccl/issues/342, /525); containers are advised to have 1 GB
# (--shm-size=1g, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html).
LEAST_SHARED, ADVISED_SHARED = 64 * 2**20, 10**9
VOLTA_WHEELS = "12.6"  # CUDA version of the newest wheels for Volta and older


def kernels() -> Check:
    """Check that torch has machine code or PTX for every visible GPU."""
    found = gpus()
    if not found:
        return unchecked("no GPU")
    if not (built := built_for()):
        return unchecked("torch does not say what it is built for")
    of_nvidia = {gpu.capability: gpu for gpu in found if gpu.capability}
    without = {capability: gpu for capability, gpu in of_nvidia.items() if not runs_on(capability, built)}
    if not without:
        return ok(f"torch is built for {', '.join(built)}")
    named = ", ".join(f"{gpu.name} (sm_{major}{minor})" for (major, minor), gpu in without.items())
    came = f"torch {installed('torch')} has none for {named}: it is built for {', '.join(built)}"
    return failed(came, torch_for([*without]))


def built_for() -> list[str]:
    """List the architectures in this torch: sm_80 (machine code), compute_90 (PTX)."""
    import torch

    return torch.cuda.get_arch_list()


def runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Check that one of the architectures `built` runs on a GPU of that compute capability.

    Machine code runs on the same major and an equal or higher minor version, PTX on all later ones, code with
    a letter only on its own architecture (CUDA C++ Programming Guide, "Compute Capability").
    """
    for each in built:
        if not (parts := re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", each)):
            continue
        of = int(parts[2]), int(parts[3])
        if of == capability:
            return True
        later = capability > of if parts[1] == "compute" else capability[0] == of[0] and capability > of
        if later and not parts[4]:
            return True
    return False


def torch_for(capabilities: list[tuple[int, int]]) -> str:
    """Return the command that installs the pinned torch with kernels for these GPUs.

    torch itself lists the architectures of its wheels; only the wheels of CUDA 12.6 have Volta and older.
    """
    import torch

    releases = getattr(torch.cuda, "PYTORCH_RELEASES_CODE_CC", {})
    machine = "aarch64" if platform.machine().lower() in ("aarch64", "arm64") else "x86_64"
    # torch 2.11 lists them for all machines alike.
    built = {cuda: of.get(machine, ()) if isinstance(of, dict) else of for cuda, of in releases.items()}
    codes = {cuda: [f"sm_{number}" for number in of] for cuda, of in built.items()}
    fit = [cuda for cuda, of in codes.items() if all(runs_on(one, of) for one in capabilities)]
    if releases and not fit:
        return "no published torch of this version has them: take an older one, or build it from source"
    cuda, version = fit[0] if fit else VOLTA_WHEELS, torch.__version__.partition("+")[0]
    index = f"https://download.pytorch.org/whl/cu{cuda.replace('.', '')}"
    return f"pip install torch=={version} --index-url {index}"


def shared_memory(ranks: int) -> Check:
    """Check the room in /dev/shm for NCCL's connections within a machine; gloo and loader need none."""
    if ranks < 2 or not gpus():
        return ok("none is needed: " + ("one process here" if ranks < 2 else "no GPU"))
    free = free_shared_memory()
    if free is None:
        return unchecked("there is no /dev/shm")
    came = f"{free / 1e6:,.0f} MB free in /dev/shm"
    if free > ADVISED_SHARED * 0.9:
        return ok(came)
    fix = "docker run --shm-size=1g (or --ipc=host); elsewhere: mount -o remount,size=1g /dev/shm"
    if free > LEAST_SHARED:
        return warning(f"{came}: NCCL is advised to have 1 GB", fix)
    return failed(f"{came}: NCCL takes some 10 MB for each connection of GPUs", fix)


def free_shared_memory() -> float | None:
    """Return the free bytes in /dev/shm; None without /dev/shm."""
    try:
        facts = os.statvfs("/dev/shm")
    except OSError:
        return None
    return float(facts.f_bavail * facts.f_frsize)
