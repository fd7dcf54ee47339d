"""Train an adapter's tasks in turn on the ranks of a launch.

python -m torch.distributed.run --nproc_per_node=2 launch/experiments/proving/worker.py TASKS.json
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch.distributed as dist

from launch.experiments.groups import temporary_groups
from launch.experiments.proving.layout import layout_of
from launch.experiments.proving.proof import Proof, open_adapter
from launch.experiments.proving.task import Task, read_tasks, wait_for
from launch.ranks.joining import order_kernels
from launch.ranks.processes import start_processes

Around = Callable[[Task], AbstractContextManager[object]]


def work(file: Path, around: Around = lambda task: contextlib.nullcontext()) -> None:
    """Train every task of a file, each within a context of its own."""
    tasks = read_tasks(file)
    order_kernels(max(layout_of(task.layout)["tp"] for task in tasks))
    start_processes()
    for task in tasks:
        adapter = open_adapter(task.adapter)
        with temporary_groups(), around(task):
            proof = Proof(task, adapter)
            try:
                adapter.train(proof)
            except BaseException:
                traceback.print_exc(file=proof.stack)
                proof.stack.flush()
                raise
            proof.end()
    # a rank that ended now would reset connections from which another still receives
    out = file.parent
    (out / f"ended-{dist.get_rank()}.txt").write_text("ended")
    wait_for([out / f"ended-{rank}.txt" for rank in range(dist.get_world_size())])
    sys.stdout.flush()
    os._exit(0)  # whatever threads and groups an adapter leaves


if __name__ == "__main__":
    work(Path(sys.argv[1]))
