"""A measured system in a process of its own, where nothing that another one keeps disturbs it."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.machine import description
from launch.ranks import joining
from tools.benchmarks.specification import Specification

LAST_LINES = 6  # of a failed process's log
# without `processes.keep_freed_memory`, as nobody has it by default
AS_STARTED = "nano", "transformers"


class WorkerFailed(Exception):
    """Failure of a measured system, with the last lines that it wrote as its message."""


class Worker:
    """The process of one system, ready to work. Raises WorkerFailed."""

    def __init__(self, spec: Specification, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = log
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, spec, log))
        self.process.start()
        theirs.close()
        try:
            self.ask()  # whether it is built
        except BaseException:
            self.end()
            raise

    def ask(self, *request: Any) -> Any:
        """Call a method of the system, named first, with arguments; return its answer."""
        try:
            if request:
                self._pipe.send(request)
            return self._pipe.recv()
        except (EOFError, OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise WorkerFailed(
                "\n".join(lines[-LAST_LINES:]) or "it ended without a word"
            ) from None

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, spec: Specification, log: Path) -> None:
    """Build the system in this new process, which writes to the log, and do what it is asked."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if spec.system in AS_STARTED:
        os.environ["MALLOC_"] = "as the C library has it"
    meeting = joining.meet()
    description.detect_machine()  # before any other code uses the accelerator
    with joining.joined(meeting, 1):
        # With torch and DeepSpeed, which the parent does not load.
        from launch.training import compiling
        from tools.benchmarks.systems import SYSTEMS

        # what is compared is compiled as ours is
        compiling.keep_gcc_from_joining_statements()
        system = SYSTEMS[spec.system](spec)
        pipe.send("built")
        while True:
            method, *arguments = pipe.recv()
            pipe.send(getattr(system, method)(*arguments))
