"""What memory a machine says it has."""

import math
import os
import subprocess
import sys

import pytest
import torch

from launch.machine import memory
from launch.machine.description import VisibleGpu


@pytest.fixture
def groups(tmp_path):
    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_the_memory_is_what_the_control_group_allows(groups):
    physical = memory.host_memory(groups({}))
    assert physical > 5e8
    v2 = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.max": "300000\n",
    }
    assert memory.host_memory(groups(v2)) == 300_000, "the group above limits it"
    assert memory.host_memory(groups({"sys/fs/cgroup/job/step/memory.max": "200000\n"})) == 200_000
    assert (
        memory.host_memory(groups({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "9" * 18}))
        == physical
    )


def test_the_memory_under_control_groups_of_version_1(groups):
    v1 = {
        "proc/self/cgroup": "5:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/elsewhere\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000\n",  # a container sees its own group at the top
        "sys/fs/cgroup/memory/other/memory.limit_in_bytes": "1\n",
    }
    assert memory.host_memory(groups(v1)) == 400_000


def test_the_smallest_gpu_stands_for_all(monkeypatch):
    found = [VisibleGpu("NVIDIA H200", (9, 0), size, 0) for size in (80e9, 24e9, 80e9)]
    monkeypatch.setattr(memory, "gpus", lambda: found)
    machine = memory.this_machine()
    assert (machine.gpus, machine.gpu_bytes) == (3, 24e9) and math.isfinite(machine.host_bytes)


def test_large_blocks_are_pinned_as_they_are_unless_the_user_says_otherwise(monkeypatch):
    key, set_ = "pinned_max_round_threshold_mb", []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_.append)
    for given in ("", "expandable_segments:True", f"{key}:1024"):
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda given=given: given)
        memory.pin_no_more_than_asked()
    assert set_ == [f"{key}:1", f"expandable_segments:True,{key}:1"], "what the user says of it stays"
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
    memory.pin_no_more_than_asked()  # torch 2.11 has no such setting
    assert len(set_) == 2


@pytest.mark.long
def test_torch_takes_these_settings():
    """In a process of its own: torch's settings last."""
    code = "from launch.machine import memory; memory.pin_no_more_than_asked(); import torch; "
    code += "print(torch._C._accelerator_getAllocatorSettings())"

    def settings(given: str | None, name: str = "PYTORCH_ALLOC_CONF") -> str:
        environ = {**os.environ, **({} if given is None else {name: given})}
        return subprocess.run(
            [sys.executable, "-c", code], env=environ, text=True, capture_output=True
        ).stdout

    assert "pinned_max_round_threshold_mb:1" in settings(None)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert settings("expandable_segments:True", name) == (
            "expandable_segments:True,pinned_max_round_threshold_mb:1\n"
        )
    assert "pinned_max_round_threshold_mb:1\n" not in settings("pinned_max_round_threshold_mb:1024")


def test_the_peak_of_a_child_is_not_its_large_parents():
    """As a launcher's is, which has imported more than the rank it starts; getrusage tells the larger one."""
    child = "from ds_configs.plan import HOST; from launch.machine.memory import peak_memory, processes; "
    child += "processes.device = lambda: HOST; print(peak_memory().bytes)"
    parent = "import subprocess, sys; large = b'x' * (300 << 20); "
    parent += f"raise SystemExit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    done = subprocess.run([sys.executable, "-c", parent], text=True, capture_output=True, check=True)
    assert 1e6 < int(done.stdout) < 150e6
