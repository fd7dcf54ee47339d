"""Rates of this machine, measured once (launch/machine/measuring.py) and kept in the cache.

The planner reads them, so that nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from data.cache import default_directory
from data.durable_files import write_atomically
from launch.machine.description import cores, cpu_model, installed


@dataclass(frozen=True)
class Rates:
    """Measured rates; operations and bytes per second are of all cores, or of one GPU.

    The rates of cores are one core's times their number, except for the shared memory: training ranks have a
    core each, and a measurement with threads would depend on other processes.

    Attributes:
        accelerator: torch's name of it, or "cpu".
        tflops: 10^12 operations/s of the fastest products, by precision.
        layer_tflops: the same of a layer's products, forward and backward; empty: not measured.
        attention_tflops: the same of causal attention, without its masked half.
        memory_gb_s: of a stream copy, reading and writing, 10^9 bytes/s.
        layer_gb_s: of a layer's work between products, each operand read and written once.
        host_gb_s: of the host's memory.
        copy_gb_s: between host and accelerator, pinned, the slower way.
        link_gb_s: on the bus of an all-reduce of two processes, or of a copy between two GPUs; None: one GPU.
        start_us: microseconds to start an operation.
        memory_bytes: of the accelerator, or of the memory for processes.
        context_bytes: of a process before its first tensor.
        watts: the board's power limit; None: unknown.
    """

    accelerator: str
    accelerators: int
    cores: int
    tflops: dict[str, float]
    layer_tflops: dict[str, float]
    attention_tflops: dict[str, float]
    memory_gb_s: float
    layer_gb_s: float
    host_gb_s: float
    copy_gb_s: float
    link_gb_s: float | None
    start_us: float
    memory_bytes: float
    host_bytes: float
    context_bytes: float
    multiprocessors: int = 1
    watts: float | None = None


def cached() -> Rates | None:
    """Read the rates of this machine with this torch from the cache; None: missing or unreadable."""
    try:
        values = json.loads(place().read_text(encoding="utf-8"))
        return Rates(**values["rates"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(rates: Rates) -> None:
    """Write the rates into the cache, if it is writable."""
    with contextlib.suppress(OSError):
        place().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place(), json.dumps({"machine": machine(), "rates": asdict(rates)}, indent=2) + "\n")


def place() -> Path:
    """Return the file of this machine in the cache."""
    digest = sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:16]
    return default_directory() / "rates" / f"{digest}.json"


def machine() -> dict[str, Any]:
    """Identify the machine without torch, alike in a command and in a launcher's processes."""
    gpus = sorted(path.read_text() for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    if os.environ.get("DS_ACCELERATOR") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        gpus = []
    names = [line for text in gpus for line in text.splitlines() if line.startswith("Model")]
    facts = {"host": socket.gethostname(), "cpu": cpu_model(), "cores": cores(), "torch": installed("torch")}
    return {**facts, "gpus": names}
