"""Run measured systems in separate processes that compute in turns, so that noise hits all alike."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.experiments.launching import own_environment
from recipes import catalog
from recipes.schema import Recipe

END = "end"
LAST_LINES = 6  # of a failed process's log
LOOK_EVERY_S, ENDS_WITHIN_S = 0.2, 30


@dataclass(frozen=True)
class Specification:
    """One measured system: a recipe, a DeepSpeed JSON, and the training code.

    Attributes:
        name: title in tables.
        system: name of the training code: "ours", "transformers", "bare", "nano" or "rate".
        settings: changes of the recipe, as for --set.
        ds_config: None: the recipe's own.
        compiled: by torch.compile.
        processes: ranks on this machine.
        shared_device: all ranks on one GPU, through gloo.
        threads: torch threads of each rank; None: the ranks share the cores.
    """

    name: str
    system: str
    recipe: str
    settings: tuple[str, ...] = ()
    tiny: bool = False
    ds_config: str | None = None
    compiled: bool = False
    processes: int = 1
    threads: int | None = None
    emulate_fp16: bool = False
    shared_device: bool = False

    def load(self) -> Recipe:
        """Load the recipe. Raises ValueError."""
        return catalog.load(self.recipe, self.settings, tiny=self.tiny)


class WorkerFailed(Exception):
    """Failure of a measured system, with the reason as its message."""


class Worker:
    """The processes of one system, ready for turns. Raises WorkerFailed."""

    def __init__(self, spec: Specification, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        written, self.spec, self._log = folder / "specification.json", spec, folder / "log.txt"
        written.write_text(json.dumps(dataclasses.asdict(spec)), encoding="utf-8")
        self._connection, theirs = multiprocessing.Pipe()
        module = "launch.experiments.benchmarks.worker"
        command = [sys.executable, "-m", module, str(written), str(theirs.fileno())]
        threads = {"OMP_NUM_THREADS": str(spec.threads)} if spec.threads else {}
        self._ranks = []
        with theirs, self._log.open("w") as log:
            for place in rank_environments(spec.processes):
                own = {**own_environment(), **place, **threads}
                passed = (theirs.fileno(),) if place["RANK"] == "0" else ()
                how: dict[str, Any] = dict(env=own, stdout=log, stderr=subprocess.STDOUT, pass_fds=passed)
                self._ranks.append(subprocess.Popen(command, **how))
        try:
            ready = self._answer()
        except BaseException:
            self.kill()
            raise
        self.start_seconds, self.said = ready["ready"], ready["said"]

    def ask(self, *command: Any) -> Any:
        """Name a method of the system, with its arguments, and return its answer."""
        self._connection.send(command)
        return self._answer()

    def _answer(self) -> Any:
        gone = False
        while not gone:
            gone = any(rank.poll() not in (None, 0) for rank in self._ranks)  # checked before the answer
            if self._connection.poll(LOOK_EVERY_S):
                with contextlib.suppress(EOFError, ConnectionResetError):
                    answer = self._connection.recv()
                    if isinstance(answer, dict) and "failed" in answer:
                        raise WorkerFailed(answer["failed"])
                    return answer
                gone = True
        self.kill()
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        raise WorkerFailed("\n".join(lines) or "it ended without a word")

    def end(self) -> None:
        """End the processes."""
        with contextlib.suppress(OSError):
            self._connection.send((END,))
        deadline = time.monotonic() + ENDS_WITHIN_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0.1, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def rank_environments(processes: int) -> list[dict[str, str]]:
    """Return the environment variables of torchrun for each rank on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared: dict[str, Any] = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = ({**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes))
    return [{name: str(value) for name, value in place.items()} for place in places]
