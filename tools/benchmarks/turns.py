"""Measured systems in processes of their own, which compute in turns, so that noise hits all alike."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from launch.machine import description
from launch.ranks import joining
from tools.benchmarks.specification import Specification

LAST_LINES = 6  # of a failed process's log
# without `processes.keep_freed_memory`, as nobody has it by default
AS_STARTED = "nano", "transformers"


class WorkerFailed(Exception):
    """Failure of a measured system, with the reason as its message."""


class TurnWorker:
    """The processes of one system, ready for turns. Raises WorkerFailed.

    Attributes:
        start_seconds: from the start of rank 0 until the system is built.
        said: what the system said meanwhile.
    """

    def __init__(self, spec: Specification, log: Path) -> None:
        self._log = log
        context = multiprocessing.get_context("spawn")
        places = rank_environments(spec.processes)
        if spec.system in AS_STARTED:
            places = [
                {**place, "MALLOC_": "as the C library has it"} for place in places
            ]
        self._ranks = [
            ProcessPoolExecutor(1, context, take_place, (place, log))
            for place in places
        ]
        others = multiprocessing.active_children()
        for rank in self._ranks:
            rank.submit(os.getpid)  # starts the process
        self._processes = [
            each for each in multiprocessing.active_children() if each not in others
        ]
        self.start_seconds, self.said = self._on_all(build, spec)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the system on every rank and return rank 0's answer."""
        return self._on_all(call, method, *arguments)

    def _on_all(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answers = [rank.submit(function, *arguments) for rank in self._ranks]
            for answer in as_completed(answers):
                answer.result()  # what fails first is the reason
            return answers[0].result()
        except BaseException as error:
            self.end()
            if isinstance(error, (Exception, SystemExit)):
                raise WorkerFailed(self._reason(error)) from None
            raise

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, WorkerFailed):
            return str(error)
        if not isinstance(error, (BrokenProcessPool, SystemExit)):
            return "".join(traceback.format_exception_only(error)).strip()
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        return "\n".join(lines) or "it ended without a word"

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for rank in self._ranks:
            rank.shutdown()


def rank_environments(processes: int) -> list[dict[str, str]]:
    """Return the environment variables of torchrun for each rank on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        for rank in range(processes)
    ]


def take_place(place: dict[str, str], log: Path) -> None:
    """Make this new process a rank of a system, which writes to the log."""
    os.environ.update(place)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # its own is one between processes, of which a killed one leaves a part
    tqdm.set_lock(threading.RLock())


# the system of this process, and what keeps it joined to the other ranks
built: dict[str, Any] = {}


def build(spec: Specification) -> tuple[float, list[str]]:
    """Build the system of this process; return the seconds and what it said. Collective."""
    started = time.time()
    meeting = joining.meet()
    try:
        description.detect_machine()  # before any other code uses the accelerator
        tp, _ = spec.load().parallel.model_parallel
        built["joined"] = joining.joined(meeting, tp)
        built["joined"].__enter__()
        # With torch and DeepSpeed, which the parent does not load, nor a rank before it has its place.
        from launch.training import compiling
        from tools.benchmarks.systems import SYSTEMS

        # what is compared is compiled as ours is
        compiling.keep_gcc_from_joining_statements()
        built["system"] = SYSTEMS[spec.system](spec)
    except ValueError as error:
        raise WorkerFailed(str(error)) from None
    return time.time() - started, built["system"].said


def call(method: str, *arguments: Any) -> Any:
    """Call a method of the system of this process."""
    return getattr(built["system"], method)(*arguments)
