"""Starting ranks from a test: real processes that talk over gloo."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rank_server import RankServer, free_port

ROOT = Path(__file__).resolve().parent.parent
WORKERS = Path(__file__).resolve().parent / "workers"
DEVICE = os.environ.get("LAUNCHED_ON", "cpu")  # board: the second device (tests/second_device)


def deepspeed(processes: int, port: int | None = None) -> list[str]:
    """The deepspeed launcher on a port that no other launch has, unless `port` says which."""
    launcher = str(Path(sys.executable).parent / "deepspeed")
    return [launcher, "--num_gpus", str(processes), "--master_port", str(port or free_port())]


def run(
    command: list[str], *, env: Mapping[str, str] | None = None, timeout: float = 180, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `command` with this repository's packages importable; `stdout` brings back stdout and stderr.

    A Python script is run by a fork that has the libraries already (see `run_ranks`), anything else as a
    program. Raises subprocess.TimeoutExpired after `timeout` seconds, once all processes are killed.
    """
    if command[0] == sys.executable and command[1].endswith(".py"):
        return run_ranks(1, *command[1:], env=env, timeout=timeout, cwd=cwd)
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
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
    processes: int,
    script: str | Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
    cwd: Path = ROOT,
    kill_after: float = 10,
) -> subprocess.CompletedProcess[str]:
    """Run `script` on ranks, one being a plain process, quickly; see rank_server.py and `run`.

    `kill_after`: seconds that the other ranks get once one has failed; launchers give them 30.
    """
    command = [str(script), *map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        try:
            code = _server().run(
                timeout,
                processes=processes,
                command=command,
                env=environment(env),
                cwd=str(cwd),
                output=str(output),
                kill_after=kill_after,
            )
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, timeout, output.read_text(errors="replace")) from None
        return subprocess.CompletedProcess(command, code, output.read_text(errors="replace"), "")


@functools.cache
def _server() -> RankServer:
    server = RankServer(environment({"TORCH_CPP_LOG_LEVEL": "ERROR", "TF_CPP_MIN_LOG_LEVEL": "3"}))
    atexit.register(server.close)
    return server


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, without a launch that it may itself be part of, plus `extra`."""
    of_a_launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    of_launchers = ("TORCHELASTIC_", "SLURM", "OMPI_", "PMI", "MPI_", "MV2_")
    kept = {k: v for k, v in os.environ.items() if k not in of_a_launch and not k.startswith(of_launchers)}
    path = os.pathsep.join(p for p in (str(ROOT), str(ROOT / "tests"), kept.get("PYTHONPATH")) if p)
    # Also on a machine with GPUs: these tests are about gloo on CPUs, with more ranks than there may be GPUs.
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": DEVICE, "PYTHONPATH": path, **(extra or {})}
