"""Starts of programs by an experiment, on ranks of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def own_environment() -> dict[str, str]:
    """Return the environment of a program that imports this checkout, from wherever it is started."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path}


def torchrun(processes: int) -> list[str]:
    """Return the words that start a program on `processes` ranks of this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]


def run_and_wait(command: Sequence[str], log: Path) -> int:
    """Run a command, its output in `log`, and return its exit code; it ends with this process."""
    with log.open("w") as file:
        launched = subprocess.Popen(
            command, env=own_environment(), stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return launched.wait()
        # Ctrl-C: torchrun must end its workers, which have sessions of their own
        except BaseException:
            launched.terminate()
            launched.wait()
            raise
