"""What memory a machine says it has."""

import math
from types import SimpleNamespace

import pytest

from launch.machine import memory


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
    import torch

    sizes = [80e9, 24e9, 80e9]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=sizes[i]))
    machine = memory.this_machine()
    assert (machine.gpus, machine.gpu_bytes) == (3, 24e9) and math.isfinite(machine.host_bytes)
