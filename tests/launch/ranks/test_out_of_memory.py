"""A rank other than 0 that runs out of memory in a real launch leaves an OOM in the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launching import WORKERS, run, run_ranks

from launch import report
from launch.ranks import ending

TINY = ["--recipe", "parallel_kinds/zero1", "--tiny", "--steps", "4", "--ds_config", "zero1"]


TRACEBACK = """\
Traceback (most recent call last):
  File "launch/training/engine.py", line 1, in train_step
    raise ValueError("no OutOfMemoryError, CUDA out of memory")
{}
"""
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    "said",
    [
        OOM,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 8.",
        "torch.AcceleratorError: CUDA error: out of memory",
        "torch.distributed.DistBackendError: NCCL error\nncclUnhandledCudaError: failed.\nLast error:\nCuda "
        "failure 2 'out of memory'",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB",
    ],
)
def test_tracebacks_that_say_oom(said):
    assert ending.out_of_memory_line(TRACEBACK.format(said))
    assert ending.out_of_memory_line(TRACEBACK.format("ValueError: no")) is None, (
        "a line of source code counts"
    )


def test_exceptions_that_are_an_oom():
    import torch

    for error in (
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        assert ending.out_of_memory_said_by(error)
    for error in (
        RuntimeError("Connection closed by peer"),
        ValueError("CUDA out of memory"),
        RuntimeError("out of tune"),
    ):
        assert ending.out_of_memory_said_by(error) is None
    assert not ending.lost_peers(RuntimeError("NCCL error: Cuda failure 2 'out of memory'")), (
        "it would wait to be ended, and say nothing"
    )
    assert ending.lost_peers(RuntimeError("NCCL communicator was aborted"))


def status_in_report(directory: Path, out: Path) -> str:
    assert report.main([str(directory), "--out", str(out)]) == 0
    return (out / "report.csv").read_text()


@pytest.mark.ci
def test_an_oom_of_rank_1_is_in_the_results_and_the_next_launch_forgets_it(tmp_path):
    directory = tmp_path / "run"
    done = run_ranks(2, WORKERS / "out_of_memory.py", *TINY, "--out", directory)
    assert (
        done.returncode != 0
        and "rank 1 of 2 failed" in done.stdout
        and "rank 0 of 2 failed" not in done.stdout
    )
    assert "OutOfMemoryError" in (directory / "error-rank-1.txt").read_text()
    row = json.loads((directory / "result.json").read_text())  # gloo tells rank 0 that it has lost rank 1
    assert row["status"] == "OOM" and row["steps"] == 2
    assert row["reason"].startswith("rank 1: torch.OutOfMemoryError: CUDA out of memory.")
    assert ",OOM," in status_in_report(directory, tmp_path / "with")
    (directory / "result.json").unlink()  # NCCL does not: the launcher ends rank 0 inside the collective
    text = status_in_report(directory, tmp_path / "without")
    assert ",OOM," in text and "rank 1: torch.OutOfMemoryError" in text

    again = run(
        [
            sys.executable,
            "launch/pretrain.py",
            *TINY,
            "--set",
            "parallel.dp=null",
            "--out",
            str(tmp_path / "other"),
        ]
    )
    assert again.returncode == 0, again.stdout[-3000:]
    (tmp_path / "other" / "error-rank-1.txt").write_text((directory / "error-rank-1.txt").read_text())
    resumed = run(
        [
            sys.executable,
            "launch/pretrain.py",
            *TINY,
            "--set",
            "parallel.dp=null",
            "--resume",
            "--out",
            str(tmp_path / "other"),
        ]
    )
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    assert not list((tmp_path / "other").glob("error-rank-*"))
    assert json.loads((tmp_path / "other" / "result.json").read_text())["status"] == "ok"
