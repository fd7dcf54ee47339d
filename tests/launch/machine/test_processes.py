"""Joining the processes of a run."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from launching import run_ranks

from modeling.parallel.process_grid import ProcessGrid

PROGRAM = """
import sys
from launch.machine import processes
if sys.argv[1] == "alone":
    processes.switch_shared_memory_op_off = lambda: None
processes.start_processes()
import torch.distributed as dist
print(f"backend {dist.get_backend()} world {dist.get_world_size()}" + chr(10), end="")  # in one write
"""


def left_behind(ranks: int, how: str, tmp_path: Path) -> set[str]:
    """Names of DeepSpeed's buffers that `ranks` processes which join each other leave in /dev/shm."""
    (tmp_path / "joining.py").write_text(PROGRAM)
    shared = Path("/dev/shm")
    before = set(os.listdir(shared))
    env = {"LOCAL_SIZE": str(ranks)}  # as the deepspeed launcher sets it
    done = run_ranks(ranks, tmp_path / "joining.py", how, env=env, timeout=500)
    assert done.returncode == 0 and f"backend gloo world {ranks}" in done.stdout, done.stdout[-3000:]
    found = {name for name in set(os.listdir(shared)) - before if "deepspeed_allreduce" in name}
    for name in found:
        (shared / name).unlink()
    return found


def test_joined_processes_leave_no_shared_memory(tmp_path):
    assert left_behind(2, "corrected", tmp_path) == set()


@pytest.mark.long
def test_deepspeed_alone_leaves_shared_memory_behind(tmp_path):
    assert left_behind(2, "alone", tmp_path), "switch_shared_memory_op_off can go"


def test_every_group_of_the_grid_has_the_timeout_asked_for(monkeypatch):
    """torch's own is 10 minutes with NCCL, which a slow start of one rank outlasts."""
    made = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, **how: made.append(how.get("timeout")))
    ProcessGrid(2, 1, 2, timedelta(minutes=30))
    assert len(made) == 2 + 2 + 4 + 1 and {*made} == {timedelta(minutes=30)}
