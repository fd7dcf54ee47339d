"""Ranks for tests, forked from a process that has imported the heavy libraries: a launch takes one second.

The client (`RankServer.run`) talks to the server (`python rank_server.py`) in lines of JSON over its standard
streams. A launch is one child of the server, the leader of a process group; its children are the ranks, which
see what torchrun would tell them. DeepSpeed, and with it `modeling` and `launch`, is not imported here: it
must meet the accelerator that a script chooses.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PRELOADED = (
    "data.corpus",
    "ds_configs.resolver",
    "matplotlib.pyplot",
    "recipes.catalog",
    "torch._inductor.compile_fx",
    "torch.distributed.run",
    "torch.utils.cpp_extension",
    "torch.utils.tensorboard",
    "transformers",
)


def free_port() -> int:
    """A port that nothing listens on now, and that no outgoing connection is given until it is used.

    Linux gives those ports from 32768 on; among them a port that is free now may be a connection of another
    launch's ranks a second later.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_768), 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return port
    raise OSError("none of 100 ports is free")


class RankServer:
    """The client's side; one launch at a time."""

    def __init__(self, env: Mapping[str, str]):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], env=dict(env), **pipes)

    def run(self, timeout: float, **launch: object) -> int:
        """Run a script on ranks, as `_launch` says, and return the first exit code that is not 0, or 0.

        Raises TimeoutError once all ranks are killed.
        """
        self._send(launch)
        group = self._receive(timeout=300)  # the first launch waits for the imports
        try:
            return self._receive(timeout)
        except TimeoutError:
            os.killpg(group, signal.SIGKILL)
            self._receive(timeout=60)
            raise

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=10)

    def _send(self, request: dict) -> None:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _receive(self, timeout: float) -> int:
        def late(*_):
            raise TimeoutError

        previous = signal.signal(signal.SIGALRM, late)
        remaining = signal.setitimer(signal.ITIMER_REAL, timeout)
        try:
            return int(self._process.stdout.readline())
        finally:
            signal.setitimer(signal.ITIMER_REAL, *remaining)
            signal.signal(signal.SIGALRM, previous)


def serve() -> None:
    """Import, then answer each request with the launch's process group and, at its end, its exit code."""
    for name in PRELOADED:
        importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        launch = os.fork()
        if launch == 0:
            os.setsid()
            answers.close()
            _end_like(_launch(**json.loads(line)))
        print(launch, file=answers, flush=True)
        print(_code(os.waitpid(launch, 0)[1]), file=answers, flush=True)
    os._exit(0)  # nothing is left to do; on a busy machine Python takes long to take the libraries down


def _launch(
    processes: int, command: list[str], env: dict[str, str], cwd: str, output: str, kill_after: float
) -> int:
    """Run `command`, a script with its arguments, on so many ranks, everything they print going to `output`.

    One process is a plain one, that knows of no ranks. When a rank fails, the others are asked to end, and
    killed `kill_after` seconds later.
    """
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    port = free_port()
    ranks = {}
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            _run(rank, processes, port, command)
        ranks[pid] = rank
    code = 0
    while ranks:
        pid, status = os.wait()
        del ranks[pid]
        if status and not code:
            code = _code(status)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
            signal.signal(signal.SIGALRM, lambda *_: [_kill(other) for other in ranks])
            signal.setitimer(signal.ITIMER_REAL, kill_after)
    return code


def _run(rank: int, processes: int, port: int, command: list[str]) -> None:
    """Be one rank: run the script as the main program, and end without returning."""
    import runpy

    import torch

    if processes > 1:
        torch.set_num_threads(1)  # the threads of OMP_NUM_THREADS below, which is read when torch is loaded
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ.update({key: str(value) for key, value in places.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        sys.path.insert(1, entry)
    code = 1
    try:
        if start := next(filter(Path.exists, (Path(p, "sitecustomize.py") for p in sys.path[1:])), None):
            runpy.run_path(str(start))  # as an interpreter does that starts with this environment
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_like(code: int) -> None:
    """End this process with an exit code, or by the signal that a negative one stands for."""
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _code(status: int) -> int:
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    serve()
