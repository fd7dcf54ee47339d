"""Starts of programs by an experiment, on ranks of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.ranks.launch_environment import FIRST_PORT, PORTS

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
        # with a port its rendezvous is static: c10d reads pickles of everyone (launch/ranks/door.py)
        f"--master_port={free_port()}",
        f"--nproc_per_node={processes}",
    ]


def free_port() -> int:
    """Return a port at which nobody listens now, and that no outgoing connection is given."""
    while True:
        port = FIRST_PORT + secrets.randbelow(PORTS)
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("", port))
            return port


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
