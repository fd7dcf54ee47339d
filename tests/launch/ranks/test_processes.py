"""Joining the processes of a run."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from launching import run_ranks

from launch.ranks import processes
from modeling.parallel.process_grid import ProcessGrid
from recipes.problems import ProblemsError

PROGRAM = """
import sys
from launch.ranks import processes
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
    own = str(tmp_path / "extensions")  # torch waits for ever on the lock of a compilation that was killed
    env = {"LOCAL_SIZE": str(ranks), "TORCH_EXTENSIONS_DIR": own}  # LOCAL_SIZE: as the deepspeed launcher
    done = run_ranks(ranks, tmp_path / "joining.py", how, env=env, timeout=500)
    assert done.returncode == 0 and f"backend gloo world {ranks}" in done.stdout, done.stdout[-3000:]
    found = {name for name in set(os.listdir(shared)) - before if "deepspeed_allreduce" in name}
    for name in found:
        (shared / name).unlink()
    return found


def test_joined_processes_leave_no_shared_memory(tmp_path):
    assert left_behind(2, "corrected", tmp_path) == set()


@pytest.mark.ci
def test_deepspeed_alone_leaves_shared_memory_behind(tmp_path):
    assert left_behind(2, "alone", tmp_path), "switch_shared_memory_op_off can go"


FREEING = """
import resource, sys
from launch.ranks import processes
processes.keep_freed_memory()
def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
b"x" * 2**26
before = pages()
for _ in range(4):
    b"x" * 2**26
print(pages() - before)
"""


@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_MMAP_MAX_": "65536"}, False)])
def test_freed_memory_is_kept_for_the_next_allocation_unless_the_user_says_otherwise(variables, kept):
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", FREEING],
        env={**own, "DS_ACCELERATOR": "cpu", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (int(run.stdout) < 1000) == kept  # of 4 x 16,384 pages


def test_every_group_of_the_grid_has_the_timeout_asked_for(monkeypatch):
    """torch's own is 10 minutes with NCCL, which a slow start of one rank outlasts."""
    made = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=None)))
    monkeypatch.setattr(dist, "new_group", lambda ranks=None, timeout=None, **_: made.append(timeout))
    ProcessGrid(2, 1, 2, timedelta(minutes=30))
    assert made == 3 * [timedelta(minutes=30)]  # this rank's own, and that of the hosts


class OneDevice:
    """An accelerator that shows this process a single device."""

    taken = None

    def device_name(self):
        return "cuda"

    def is_synchronized_device(self):
        return False

    def device_count(self):
        return 1

    def visible_devices_envs(self):
        return ["CUDA_VISIBLE_DEVICES"]

    def set_device(self, index):
        self.taken = index


@pytest.fixture
def one_device(monkeypatch):
    for name in (processes.OWN_LOCAL_RANK, "CUDA_VISIBLE_DEVICES", "SLURM_GPUS_PER_TASK", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_RANK", "2")
    fake = OneDevice()
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: fake)
    return fake


def test_a_rank_to_which_slurm_shows_one_device_takes_it(one_device, monkeypatch):
    """DeepSpeed takes LOCAL_RANK for the device, and its engine wants Open MPI's to be the same."""
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    for _ in range(2):
        assert processes.take_device() == 0 == one_device.taken
        assert os.environ["LOCAL_RANK"] == "0" == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]
        assert processes.local_rank() == 2


def test_a_rank_without_a_device_is_refused(one_device, monkeypatch):
    with pytest.raises(ProblemsError, match="local rank 2 has no cuda device of its own: this machine has 1"):
        processes.take_device()
    assert os.environ["LOCAL_RANK"] == "2" and one_device.taken is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert processes.take_device() == 0 == processes.local_rank()


def test_ranks_that_share_a_device_are_told():
    processes.check_shared_devices([("a", "GPU-1"), ("b", "GPU-1"), ("a", "GPU-2"), None, None])
    with pytest.raises(ProblemsError, match="ranks 0, 2 on a have one GPU, GPU-1: each rank needs one"):
        processes.check_shared_devices([("a", "GPU-1"), ("b", "GPU-1"), ["a", "GPU-1"]])


@pytest.mark.parametrize("value", [7, [7], {"a": "ä"}])
def test_what_ranks_tell_each_other_comes_back_even_if_it_is_one_byte(value):
    sent = []
    assert processes._sent(value, sent.append, Any) == value
    assert processes._received(lambda tensor: tensor.copy_(sent.pop(0)), Any) == value
