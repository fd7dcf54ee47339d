"""Run one rank of a measured system; it computes only in its turns.

python -m launch.experiments.benchmarks.worker SPECIFICATION.json FILE-DESCRIPTOR

(started by `turns.py`; rank 0 receives commands over the connection and broadcasts them)
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from launch.experiments.benchmarks.turns import END, Specification
from launch.machine import abilities
from launch.ranks import joining, processes


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
            from launch.experiments.benchmarks.systems import SYSTEMS
            from launch.training import compiling

            compiling.keep_gcc_from_joining_statements()  # what is compared is compiled as ours is
            system = SYSTEMS[spec.system](spec)
        if parent:
            parent.send({"ready": time.time() - started, "said": system.said})
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
    """Call the methods of the system that the parent names, until it says the end. Collective."""
    import torch.distributed as dist

    while True:
        asked: list[Any] = [parent.recv() if parent else None]
        dist.broadcast_object_list(asked, src=0, group=system.grid.control_group)
        method, *arguments = asked[0]
        if method == END:
            return
        answer = getattr(system, method)(*arguments)
        if parent:
            parent.send(answer)


def share_device() -> None:
    """Put every rank on the first GPU, with gloo, since NCCL refuses two ranks on one GPU."""
    from deepspeed.accelerator import get_accelerator

    os.environ["LOCAL_RANK"] = "0"
    get_accelerator()._communication_backend_name = "gloo"


if __name__ == "__main__":
    main()
