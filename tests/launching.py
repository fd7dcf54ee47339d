"""Starting ranks from a test: real processes that talk over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).resolve().parent / "workers"


def run(
    command: list[str], *, env: Mapping[str, str] | None = None, timeout: float = 180, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `command` with this repository's packages importable; stdout and stderr come back together in `stdout`.

    Raises subprocess.TimeoutExpired after `timeout` seconds, once the command and all its children are killed.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(
            process.pid, signal.SIGTERM
        )  # torchrun passes it on: its workers are in sessions of their own
        try:
            output, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        raise subprocess.TimeoutExpired(command, timeout, output) from None
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def run_ranks(
    processes: int, script: Path, *args: object, env: Mapping[str, str] | None = None, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """Run `script` on `processes` ranks of one torchrun launch; see `run`."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    return run([*launcher, str(script), *map(str, args)], env=env, timeout=timeout)


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, without a launch that it may itself be part of, plus `extra`."""
    of_a_launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in of_a_launch and not k.startswith("TORCHELASTIC_")}
    path = os.pathsep.join(p for p in (str(ROOT), kept.get("PYTHONPATH", "")) if p)
    # Also on a machine with GPUs: these tests are about gloo on CPUs, with more ranks than there may be GPUs.
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path, **(extra or {})}
