"""What a run says it ran on."""

import json
import subprocess

import pytest
import torch

from launch.machine import description
from launch.ranks import processes


@pytest.mark.skipif(processes.device().own_memory, reason="a device that is asked itself")
def test_what_cores_can_do_is_the_same_on_paper(tmp_path, monkeypatch):
    here = description.detect_machine()
    assert description.detect_machine(on_paper=True) == here
    halves = description.halves_of_cores()
    with monkeypatch.context() as unknown:
        unknown.setattr(description, "halves_of_cores", lambda: None)
        unasked = description.detect_machine(on_paper=True)
    by_torch = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert unasked.slow_bf16 is not by_torch and here.slow_bf16 is not (halves[1] if halves else by_torch)
    cores = {  # flags -> products in fp16, in bf16
        "sse2 avx2": (False, False),
        "avx2 avx512f avx512bw avx512vl avx512dq": (False, False),  # bf16 at a fifth of fp32's rate
        "avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16": (False, True),
        "avx512f avx512_fp16 amx_bf16": (True, True),
        "avx2 avx_vnni avx_ne_convert": (True, True),
    }
    for number, (flags, can) in enumerate(cores.items()):
        (file := tmp_path / str(number)).write_text(f"processor: 0\nflags\t\t: fpu {flags}\n")
        assert description.halves_of_cores(file) == can
    assert description.halves_of_cores(tmp_path / "none") is None, "torch is asked"


def test_the_hardware_is_described(tmp_path):
    described = description.describe()
    assert described["cpu"] and described["memory_gb"] > 0 and described["versions"]["deepspeed"]
    assert description.git_state(tmp_path) is None, "no checkout, no commit"
    json.dumps(described, allow_nan=False)
    assert description.summary({"accelerators": 8, "accelerator": "V100"}) == "8 x V100"


def test_the_commit_of_another_checkout_is_not_ours(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init")
    assert description.git_state(tmp_path) is None, "no commit yet"
    git("commit", "--allow-empty", "-m", "empty")
    assert description.git_state(tmp_path) == {
        "commit": description.git_state(tmp_path)["commit"],
        "dirty": False,
    }
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("")
    assert description.git_state(tmp_path)["dirty"] is True
    assert description.git_state(tmp_path / "inner") is None


def test_links_between_gpus_are_read_from_nvidia_smi(monkeypatch):
    matrix = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV2\tSYS\tPIX\t0-19\n"
        "GPU1\tNV2\t X \tPHB\tPIX\t0-19\nGPU2\tSYS\tPHB\t X \tNODE\t0-19\nNIC0\tPIX\tPIX\tNODE\t X \n"
    )
    monkeypatch.setattr(description, "_output", lambda *command: matrix)
    assert description.links() == ["NV2", "PHB", "SYS"]
    monkeypatch.setattr(description, "_output", lambda *command: None)
    assert description.links() is None and description.driver() is None
