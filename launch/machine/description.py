"""The machine and software of a run: processor, accelerators, versions, commit of the checkout."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from launch.machine.abilities import gpus
from launch.machine.memory import physical_memory
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
    found = gpus()
    cuda = None
    nccl = None
    if found:
        import torch

        cuda = torch.version.cuda
        if cuda and torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gb": round(physical_memory() / 1e9, 1),
        "accelerator": found[0].name if found else "cpu",
        "accelerators": len(found),
        "accelerator_memory_gb": round(found[0].total / 1e9, 1) if found else None,
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
