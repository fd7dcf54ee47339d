"""Run one rank of a measured system; it computes only in its turns.

python -m launch.experiments.benchmarks.worker SPECIFICATION.json FILE-DESCRIPTOR

(started by `turns.py`; rank 0 receives commands over the connection and broadcasts them)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.experiments.benchmarks.specification import Specification
from launch.machine import abilities
from launch.ranks import joining, processes

COLLECTIVES = "nccl"  # prefix of a GPU's collective kernels
SHOWN = 15  # lines of a profile
# Kernels of attention: FlashAttention's, cuDNN's, the memory-efficient ones, and plain softmax.
ATTENTION = re.compile(
    "flash|fmha|efficient|sdpa|cudnn.*attention|attention.*cudnn|flex|(?<!log)(?<!log_)softmax", re.IGNORECASE
)


def main() -> None:
    started = time.time()
    meeting = joining.meet()
    spec = Specification(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    parent = Connection(int(sys.argv[2])) if processes.rank() == 0 else None
    with send_refusals(parent):
        abilities.detect_machine(spec.emulate_fp16)  # before any other code uses the accelerator
        tp, _ = spec.load().parallel.model_parallel
    if spec.shared_device:
        share_device()
    with joining.joined(meeting, tp, own_devices=not spec.shared_device):
        with send_refusals(parent):
            from launch.experiments.benchmarks import systems
            from launch.training import compiling

            compiling.keep_gcc_from_joining_statements()  # what is compared is compiled as ours is
            kinds: dict[str, Any] = {
                "ours": systems.Ours, "transformers": systems.Transformers, "bare": systems.Bare,
                "nano": systems.Nano, "rate": systems.MatrixRate,
            }  # fmt: skip
            system = kinds[spec.system](spec)
        if parent:
            parent.send({"ready": time.time() - started, "said": getattr(system, "said", [])})
        serve(system, parent)


@contextlib.contextmanager
def send_refusals(parent: Connection | None) -> Iterator[None]:
    """Send the message of a ValueError in the block to the parent, and raise it again."""
    try:
        yield
    except ValueError as error:
        if parent:
            parent.send({"failed": str(error)})
        raise


def serve(system: Any, parent: Connection | None) -> None:
    """Answer the parent's commands until the command "end". Collective."""
    import torch.distributed as dist

    commands: dict[str, Callable[..., Any]] = {
        "run": run, "phases": phases, "profile": profile, "rates": lambda system, n: system.rates(n),
        "memory": memory, "graphs": graphs,
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
    """Run `steps` steps and return (seconds, tokens, operations) of each."""
    from launch.experiments.benchmarks.clock import now

    found = []
    for _ in range(steps):
        started = now()
        work = system.step()
        found.append((now() - started, *work))
    return found


def phases(system: Any, steps: int) -> list[dict[str, float]]:
    """Return mean seconds per phase on every rank over `steps` steps; "step" is the whole step."""
    from launch.ranks.processes import gathered

    system.clock.running = True
    whole = sum(seconds for seconds, *_ in run(system, steps))
    system.clock.running = False
    own = {"step": whole, **system.clock.take()}
    return gathered({name: seconds / steps for name, seconds in own.items()}, system.data.grid.control_group)


def profile(system: Any, trace: str | None, steps: int) -> dict[str, Any]:
    """Profile rank 0: slowest operations, attention kernels, seconds of collectives; write a Chrome trace."""
    import torch
    from torch.profiler import ProfilerActivity

    gpu = processes.device().own_memory
    kinds = torch.profiler.supported_activities() if gpu else {ProfilerActivity.CPU}
    with torch.profiler.profile(activities=kinds) as profiler:
        run(system, steps)
    averages = profiler.key_averages()
    lasting = "self_device_time_total" if gpu else "self_cpu_time_total"
    kernels = [e for e in averages if e.key.startswith(COLLECTIVES)]
    top = sorted(averages, key=lambda event: -getattr(event, lasting))[:SHOWN]
    if trace and os.environ.get("RANK", "0") == "0":
        profiler.export_chrome_trace(trace)
    return {
        "attention": sorted({e.key[:100] for e in averages if ATTENTION.search(e.key)}),
        "collectives": sum(getattr(e, lasting) for e in kernels) / 1e6 / steps,
        "top": [(e.key[:80], getattr(e, lasting) / 1e6 / steps, e.count / steps) for e in top],
    }


def share_device() -> None:
    """Put every rank on the first GPU, with gloo, since NCCL refuses two ranks on one GPU."""
    from deepspeed.accelerator import get_accelerator

    os.environ["LOCAL_RANK"] = "0"
    get_accelerator()._communication_backend_name = "gloo"


def graphs(system: Any) -> dict[str, Any]:
    """Count the graphs of torch.compile so far, and the reasons of graph breaks."""
    from torch._dynamo.utils import counters

    breaks = {reason[:200]: count for reason, count in counters["graph_break"].items()}
    return {"graphs": counters["stats"].get("unique_graphs", 0), "breaks": breaks}


def memory(system: Any) -> dict[str, Any]:
    """Return the largest memory peak of any rank."""
    from launch.machine.memory import peak_memory
    from launch.ranks.processes import gathered

    own = peak_memory()
    return {"peak_bytes": max(gathered(own.bytes, system.data.grid.control_group)), "kind": own.kind}


if __name__ == "__main__":
    main()
