"""Checks of a machine by the doctor alone: interpreter, GPUs, compilers, file systems, clocks."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from ds_configs.plan import Machine
from launch.console import output
from launch.machine import abilities, compiled_ops
from launch.machine.abilities import gpus
from launch.machine.checks import Check, failed, ok, unchecked, warning
from launch.machine.description import cores, installed
from launch.machine.places import existing
from recipes.problems import counted

# File systems that other machines may see; all others belong to this machine.
NETWORK = re.compile(
    r"nfs|lustre|gpfs|beegfs|ceph|cifs|smb|glusterfs|fuse\.|9p|virtiofs|wekafs|panfs|orangefs|pvfs|afs|daos"
)
CLOCK_S = 2.0  # seconds; with a larger difference of clocks, times of files mislead


def python() -> Check:
    """Check the interpreter against pyproject's requires-python."""
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    try:
        bounds = metadata.metadata("megarecipes")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return unchecked(f"{version}; megarecipes is not installed: pip install -e . states which are fit")
    if version in SpecifierSet(bounds):
        return ok(version)
    fix = "make a virtual environment with a fit one: make setup PYTHON=python3.11"
    return failed(f"{version}, and {bounds} is needed", fix)


def accelerator() -> Check:
    """Check the GPUs that torch sees, and their free memory."""
    found = gpus(with_free=True)
    if not found:
        why = cpu_only()
        came = f"no GPU{why}: {counted(cores(), 'core')} of the CPU"
        fix = "install a CUDA build of torch, or hide them with CUDA_VISIBLE_DEVICES="
        return warning(came, fix) if why else ok(came)
    names = ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.total / 1e9:.3g} GB)" for gpu in found))
    came = f"{counted(len(found), 'GPU')}: {names}"
    if len({gpu.name for gpu in found}) > 1:
        return warning(f"{came}: the slowest sets the pace", "choose equal ones: CUDA_VISIBLE_DEVICES")
    if taken := [str(number) for number, gpu in enumerate(found) if gpu.free < 0.9 * gpu.total]:
        came += f"; of the memory of {', '.join(taken)} more than a tenth is taken"
        return warning(came, "look with nvidia-smi which process holds it")
    return ok(came)


def cpu_only() -> str:
    """Say why torch uses no GPU though the system shows one; "" if there is none or none is wanted."""
    import torch

    hidden = os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if hidden or not list(Path("/dev").glob("nvidia[0-9]*")):
        return ""
    why = "cannot use it (driver?)" if torch.version.cuda else "is a build for CPUs"
    return f", though there is /dev/nvidia0: torch {torch.__version__} {why}"


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
        f"{op.builder.removesuffix('Builder')} {'is built' if compiled_ops.is_built(op) else later}"
        for op in needed
    )
    if os.access(directory, os.W_OK):
        return ok(came)
    fix = "set TORCH_EXTENSIONS_DIR or MEGARECIPES_CACHE to a writable directory"
    return failed(f"{directory} is not writable: {came}", fix)


def file_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def writable(directory: Path) -> Check:
    """Check by a file that the run directory is writable or can be made."""
    output.directory("--out", directory)
    return ok(f"{directory} " + ("is writable" if directory.exists() else "can be made"))


def clock(directory: Path) -> Check:
    """Compare a file server's clock with this machine's, by the time of a new file."""
    place = existing(directory)
    if NETWORK.match(kind_of(place) or ""):
        return judge_clock("the file server", server_time(place) - time.time())
    return unchecked("the file system is this machine's: no other clock to compare with")


def judge_clock(whose: str, ahead: float) -> Check:
    """Judge another clock, which is `ahead` of this one by so many seconds."""
    if abs(ahead) <= CLOCK_S:
        return ok(f"{whose} is {abs(ahead):.1f} s away")
    came = f"{whose} is {abs(ahead):,.1f} s {'ahead' if ahead > 0 else 'behind'}"
    return warning(f"{came}: times of files and logs mislead", "set the clocks by NTP (chronyd)")


def server_time(place: Path) -> float:
    """Return the seconds since 1970 on the machine with the files of `place`."""
    with tempfile.TemporaryFile(dir=place) as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def kind_of(place: Path) -> str | None:
    """Return the type of `place`'s file system, such as ext4; None if the system does not say."""
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return None
    mounts = [(line.split(" ")[1].encode().decode("unicode_escape"), line.split(" ")[2]) for line in lines]
    real = place.resolve()
    holding = [(mount, kind) for mount, kind in mounts if real.is_relative_to(mount)]
    # The last of equals was mounted over the others.
    return max(reversed(holding), key=lambda held: len(held[0]))[1] if holding else None
