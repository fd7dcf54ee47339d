"""A rank of a measured system. It waits for its turns, so that of many systems one computes at a time.

python -m launch.benchmarks.worker SPECIFICATION.json FILE-DESCRIPTOR

(started by `launch.benchmarks.turns`; rank 0 has the other end of the connection and tells the others)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.benchmarks.specification import Specification
from launch.console import quiet

COMMUNICATION = ("gloo:", "nccl:", "c10d::", "nccl")  # how the profiler's events of collectives begin
SHOWN = 15  # lines of a profile


def main() -> None:
    started = time.time()
    quiet.quiet_libraries()
    spec = Specification(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    from launch.machine import abilities, ending, orphans, processes

    first = processes.rank() == 0
    parent = Connection(int(sys.argv[2])) if first else None
    orphans.end_with_launcher()
    with ending.clean_exit():
        try:
            abilities.detect_machine(spec.emulate_fp16)  # before anything takes the accelerator
            processes.start_processes()
            from launch.benchmarks import systems

            kinds: dict[str, Any] = {
                "ours": systems.Ours, "transformers": systems.Transformers, "bare": systems.Bare,
                "nano": systems.Nano, "rate": systems.MatrixRate,
            }  # fmt: skip
            system = kinds[spec.system](spec)
        except ValueError as error:
            if parent:
                parent.send({"failed": str(error)})
            raise
        if parent:
            parent.send({"ready": time.time() - started, "said": getattr(system, "said", [])})
        serve(system, parent)


def serve(system: Any, parent: Connection | None) -> None:
    """Do what the parent asks for until it asks for the end. Collective."""
    import torch.distributed as dist

    commands: dict[str, Callable[..., Any]] = {
        "run": run, "phases": phases, "profile": profile, "rates": lambda system, n: system.rates(n),
        "memory": memory,
    }  # fmt: skip
    while True:
        asked: list[Any] = [parent.recv() if parent else None]
        dist.broadcast_object_list(asked, src=0, group=system.data.grid.control_group)
        command, *arguments = asked[0]
        if command == "end":
            return
        answer = commands[command](system, *arguments)
        if parent:
            parent.send(answer)


def run(system: Any, steps: int) -> list[tuple[float, int, int]]:
    """(seconds, tokens, operations) of each of so many steps."""
    from launch.benchmarks.clock import now

    found = []
    for _ in range(steps):
        started = now()
        work = system.step()
        found.append((now() - started, *work))
    return found


def phases(system: Any, steps: int) -> list[dict[str, float]]:
    """Seconds of a step and of its parts on every rank, means of so many; "step" is the whole."""
    from launch.machine.processes import gathered

    system.clock.running = True
    whole = sum(seconds for seconds, *_ in run(system, steps))
    system.clock.running = False
    own = {"step": whole, **system.clock.take()}
    return gathered({name: seconds / steps for name, seconds in own.items()}, system.data.grid.control_group)


def profile(system: Any, trace: str | None, steps: int) -> dict[str, Any]:
    """Seconds of a step in collectives, on rank 0, and what takes longest; a trace for chrome://tracing."""
    import torch
    from torch.profiler import ProfilerActivity

    gpu = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with torch.profiler.profile(activities=kinds) as profiler:
        run(system, steps)
    averages = profiler.key_averages()
    lasting = "self_device_time_total" if gpu else "self_cpu_time_total"
    collectives = {
        e.key: getattr(e, lasting) / 1e6 / steps for e in averages if e.key.startswith(COMMUNICATION)
    }
    top = sorted(averages, key=lambda event: -getattr(event, lasting))[:SHOWN]
    if trace and os.environ.get("RANK", "0") == "0":
        profiler.export_chrome_trace(trace)
    return {
        "communication": sum(collectives.values()),
        "collectives": collectives,
        "top": [(e.key[:80], getattr(e, lasting) / 1e6 / steps, e.count / steps) for e in top],
    }


def memory(system: Any) -> dict[str, Any]:
    """The largest peak of any rank."""
    from launch.machine.memory import peak_memory
    from launch.machine.processes import gathered

    peaks = gathered(peak_memory().bytes, system.data.grid.control_group)
    return {"peak_bytes": max(peaks), "kind": peak_memory().kind}


if __name__ == "__main__":
    main()
