"""What a GPU's kernels need, and what happens where the first one does not compile. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from launching import run
from second_device.running import needed, on_board

from ds_configs.plan import Device
from launch.machine import drivers
from launch.ranks import processes
from launch.training import agreement
from modeling import fusing

HEADER = "fatal error: Python.h: No such file or directory"


@pytest.fixture
def triton(monkeypatch):
    """A machine with Triton, gcc and Python's headers, as far as can be asked."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(fusing, "missing_for_kernels", fusing.missing_for_kernels.__wrapped__)
    monkeypatch.setattr(fusing, "_given_up", [])
    monkeypatch.setenv("CC", sys.executable)


def test_a_gpu_without_pythons_headers_fuses_nothing(triton, monkeypatch, tmp_path):
    assert fusing.has_gpu_compiler()
    monkeypatch.setattr(fusing.sysconfig, "get_path", lambda which: str(tmp_path))
    assert not fusing.has_gpu_compiler() and not fusing.fuses(torch.empty(1, device="meta"))
    assert fusing.failure_of_kernels(torch.device("cpu")) == "no Python.h"
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "Python.h").touch()
    monkeypatch.setenv("CPATH", f":{tmp_path / 'else'}")
    assert fusing.has_gpu_compiler()


def test_a_first_kernel_that_does_not_compile_is_told_by_all_ranks_and_a_plan(triton, monkeypatch):
    def refuse(function):
        raise subprocess.CalledProcessError(1, "gcc", stderr=HEADER)

    monkeypatch.setattr(fusing, "_compiled", refuse)
    monkeypatch.setattr(processes, "device", lambda: Device("cpu", asynchronous=True, own_memory=True))
    monkeypatch.setattr(processes, "texts_of_all", lambda own, group: own)
    assert "CalledProcessError" in agreement.kernel_failure(None)
    monkeypatch.setattr(drivers, "gpus", lambda: [1])
    found = drivers.fused_kernels()
    assert found.verdict == "warning" and "python3-dev" in found.fix
    fusing.give_up()
    assert not fusing.has_gpu_compiler()


@needed
@pytest.mark.parametrize("headers", [pytest.param(False, marks=pytest.mark.ci), True])
def test_a_training_starts_eagerly_where_kernels_do_not_compile(tmp_path, headers):
    """The second device has no Triton: where one is said to be there, its first kernel fails."""
    script = tmp_path / "train.py"
    wish = "on" if headers else "auto"  # "on" would be refused
    script.write_text(f"""
import runpy, sys, sysconfig
import torch.utils._triton
torch.utils._triton.has_triton = lambda: True
paths = sysconfig.get_path
if not {headers}:  # torch, which asks with a scheme, compiles the device all the same
    sysconfig.get_path = lambda *of, **how: paths(*of, **how) if how else "/nowhere"
flags = "--tiny --steps 2 --ds_config zero1 --set dropout.hidden=0.1 --compile={wish} --out"
sys.argv = ["pretrain.py", *flags.split(), {str(tmp_path / "run")!r}]
runpy.run_module("launch.pretrain", run_name="__main__")
""")
    done = run([sys.executable, str(script)], env=on_board(), timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
    (said,) = [line for line in done.stdout.splitlines() if "nothing is compiled for the GPU" in line]
    assert ("no Python.h" in said) != headers and "step 2" in " ".join(done.stdout.split()), said
