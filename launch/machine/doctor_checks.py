"""Checks of a machine by the doctor alone: GPUs, compilers, file systems, clocks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil

from ds_configs.plan import Machine
from launch.console import output
from launch.machine import abilities, compiled_ops
from launch.machine.abilities import gpus
from launch.machine.checks import Check, failed, ok, unchecked, warning
from launch.machine.description import cores, installed
from launch.machine.start_checks import existing, files_needed
from launch.ranks import processes
from recipes.problems import counted
from recipes.refused_by_system import take_file_handles

# File systems that other machines may see; all others belong to this machine.
NETWORK = re.compile(
    r"nfs|lustre|gpfs|beegfs|ceph|cifs|smb|glusterfs|fuse\.|9p|virtiofs|wekafs|panfs|orangefs|pvfs|afs|daos"
)
IN_MEMORY = ("tmpfs", "ramfs")
CLOCK_S = 2.0  # seconds; with a larger difference of clocks, times of files mislead


def accelerator() -> Check:
    """Check the GPUs that torch sees, and their free memory."""
    found = gpus(with_free=True)
    if not found:
        return no_gpu()
    names = ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.total / 1e9:.3g} GB)" for gpu in found))
    came = f"{counted(len(found), 'GPU')}: {names}"
    if len({gpu.name for gpu in found}) > 1:
        return warning(f"{came}: the slowest sets the pace", "choose equal ones: CUDA_VISIBLE_DEVICES")
    if taken := [str(number) for number, gpu in enumerate(found) if gpu.free < 0.9 * gpu.total]:
        came += f"; of the memory of {', '.join(taken)} more than a tenth is taken"
        return warning(came, "look with nvidia-smi which process holds it")
    return ok(came)


def no_gpu() -> Check:
    """Warn if torch uses no GPU though the system shows one that nobody has hidden."""
    import torch

    came = f"no GPU: {counted(cores(), 'core')} of the CPU"
    hidden = os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if hidden or not list(Path("/dev").glob("nvidia[0-9]*")):
        return ok(came)
    why = "cannot use it (driver?)" if torch.version.cuda else "is a build for CPUs"
    fix = "install a CUDA build of torch, or hide them with CUDA_VISIBLE_DEVICES="
    return warning(f"{came}, though there is /dev/nvidia0: torch {torch.__version__} {why}", fix)


def precision(machine: Machine) -> Check:
    """List the precisions of the accelerator."""
    there = {"fp32": True, "bf16": machine.bf16, "fp16": machine.fp16}
    able, unable = ([name for name, has in there.items() if has is wanted] for wanted in (True, False))
    slow = " (no instructions for bf16: slow)" if machine.slow_bf16 else ""
    return ok(", ".join(able) + slow + (f"; no {', no '.join(unable)}" if unable else ""))


def compiler() -> Check:
    """Check for the C++ compiler of DeepSpeed's ops, ninja and headers."""
    if missing := abilities.missing_for_compiling():
        slower = "torch's optimizer takes the place of DeepSpeed's compiled one, slower"
        fix = "apt-get install g++ ninja-build python3-dev (Debian, Ubuntu)"
        return warning(f"no {', no '.join(missing)}: {slower}", fix)
    return ok(f"{shutil.which(os.environ.get('CXX', 'c++'))}, ninja, Python's headers")


def fused_kernels() -> Check:
    """Compile a kernel and run it on the GPU, as dropout and the loss are compiled in every training."""
    import torch

    from modeling import fusing

    if not gpus():
        return unchecked("no GPU")
    if failure := fusing.failure_of_kernels(torch.device(processes.device().name)):
        slower = "nothing is compiled for the GPU, torch's own kernels run, slower"
        return warning(f"{failure}: {slower}", "apt-get install gcc python3-dev (Debian, Ubuntu)")
    return ok("a kernel was compiled and has run")


def cuda_compiler() -> Check:
    """Check that nvcc has the major version of torch's CUDA: torch loads the ops that it compiles."""
    wanted = torch_cuda()
    if wanted is None or not gpus():
        return unchecked("no GPU" if wanted else f"torch {installed('torch')} has no CUDA")
    found = nvcc_version()
    if found is None:
        return warning("no nvcc: no NVMe offload", f"install the CUDA toolkit {wanted} and set CUDA_HOME")
    if found.split(".")[0] == wanted.split(".")[0]:
        return ok(f"nvcc {found}; torch has CUDA {wanted}")
    came = f"nvcc {found}, and torch has CUDA {wanted}: DeepSpeed's CUDA ops need the same major version"
    return failed(came, f"set CUDA_HOME to a CUDA toolkit {wanted}, or install torch for CUDA {found}")


def torch_cuda() -> str | None:
    """Return torch's CUDA version, such as 13.0; None: a build for CPUs."""
    import torch

    return torch.version.cuda


def nvcc_version() -> str | None:
    """Return the version of torch's and DeepSpeed's nvcc, such as 12.6; None: there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    try:
        command = [str(Path(CUDA_HOME or "", "bin", "nvcc")), "--version"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found[1] if (found := re.search(r"release (\d+\.\d+)", said)) else None


def libaio(machine: Machine) -> Check:
    """Look for the library of NVMe offload; without it the resolver refuses NVMe offload."""
    if machine.libaio:
        return ok("there, for NVMe offload")
    return ok("only NVMe offload needs it, and it is not installed (apt-get install libaio-dev)")


def ops(ds: dict[str, Any]) -> Check:
    """Check DeepSpeed's ops for the resolved JSON `ds`: built already, or compiled at the first start."""
    if not (needed := compiled_ops.needed(ds)):
        return ok("none is used: torch's operations step")
    directory = compiled_ops.use_own_directory()
    later = "is compiled at the first start (about 40 s)"
    came = "; ".join(
        f"{op.removesuffix('Builder')} {'is built' if compiled_ops.is_built(op) else later}" for op in needed
    )
    if os.access(directory, os.W_OK):
        return ok(came)
    fix = "set TORCH_EXTENSIONS_DIR or MEGARECIPES_CACHE to a writable directory"
    return failed(f"{directory} is not writable: {came}", fix)


def open_files(world: int) -> Check:
    """Check the hard limit of open files; a run raises the soft limit up to it by itself."""
    take_file_handles(files_needed(world))
    return ok(f"{files_needed(world):,} are needed, and allowed")


def writable(directory: Path) -> Check:
    """Check by a file that the run directory is writable or can be made."""
    output.directory("--out", directory)
    return ok(f"{directory} " + ("is writable" if directory.exists() else "can be made"))


def file_system(directory: Path, several: bool) -> Check:
    """Check the kind of file system: not in memory, and shared if the run has `several` machines."""
    kind = kind_of(existing(directory))
    network = bool(NETWORK.match(kind))
    if several and not network:
        fix = "name one on a shared file system with --out, by its absolute path"
        return warning(f"{kind}, of this machine: all machines write into one run directory", fix)
    if kind in IN_MEMORY:
        return warning(f"{kind}: it takes memory, and is gone after a restart", "name a disk with --out")
    return ok(f"{kind}, " + ("over the network" if network else "of this machine"))


def kind_of(place: Path) -> str:
    """Return the type of `place`'s file system, such as ext4."""
    real = place.resolve()
    holding = [each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)]
    # The last of equals was mounted over the others.
    return max(reversed(holding), key=lambda each: len(each.mountpoint)).fstype if holding else "unknown"


def clock(whose: str, ahead: float) -> Check:
    """Judge another clock, which is `ahead` of this one by so many seconds."""
    if abs(ahead) <= CLOCK_S:
        return ok(f"{whose} is {abs(ahead):.1f} s away")
    came = f"{whose} is {abs(ahead):,.1f} s {'ahead' if ahead > 0 else 'behind'}"
    return warning(f"{came}: times of files and logs mislead", "set the clocks by NTP (chronyd)")
