"""The machine and software of a run: processor, accelerators, versions, commit of the checkout."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from launch.machine.memory import physical_memory
from recipes.problems import counted

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "accelerate", "tokenizers", "numpy")
REPOSITORY = Path(__file__).resolve().parents[2]


def describe(repository: Path = REPOSITORY) -> dict[str, Any]:
    """Machine, versions and commit; memory in units of 1e9 bytes, of one accelerator.

    Cores are those that this process may use (containers and taskset give fewer than the machine has), and
    accelerators those that it sees on this node.
    """
    import torch

    gpu = torch.cuda.is_available()
    memory = torch.cuda.get_device_properties(0).total_memory if gpu else None
    return {
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": cores(),
        "memory_gb": round(physical_memory() / 1e9, 1),
        "accelerator": torch.cuda.get_device_name(0) if gpu else "cpu",
        "accelerators": torch.cuda.device_count() if gpu else 0,
        "accelerator_memory_gb": None if memory is None else round(memory / 1e9, 1),
        "cuda": torch.version.cuda if gpu else None,
        "versions": versions(),
        "git": git_state(repository),
    }


def summary(described: Mapping[str, Any]) -> str:
    """One phrase for tables: "1 x NVIDIA H100", or "CPU: AMD EPYC, 2 cores" without an accelerator."""
    if described["accelerators"]:
        return f"{described['accelerators']} x {described['accelerator']}"
    return f"CPU: {described['cpu']}, {counted(described['cores'], 'core')}"


def versions() -> dict[str, str | None]:
    """Python and the packages that decide the numbers; None where one is not installed."""
    return {"python": platform.python_version(), **{package: installed(package) for package in PACKAGES}}


def installed(package: str) -> str | None:
    """Version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def git_state(repository: Path) -> dict[str, Any] | None:
    """Commit of the checkout and whether files differ from it; None where `repository` is not its top.

    A package installed inside somebody else's checkout (a virtual environment there) must not report that.
    """
    top = _git(repository, "rev-parse", "--show-toplevel")
    commit = _git(repository, "rev-parse", "HEAD")
    if top is None or commit is None or Path(top).resolve() != repository.resolve():
        return None
    status = _git(repository, "status", "--porcelain")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The processor's marketing name where the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git(directory: Path, *arguments: str) -> str | None:
    """Output of git, or None where it fails, hangs or is not installed: a run never depends on it."""
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
