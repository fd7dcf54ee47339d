"""Joining the processes of a run."""

import os
from pathlib import Path

import pytest
from launching import run_ranks

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
