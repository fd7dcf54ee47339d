"""Flat tensors of more than 2^31 elements: what a plan refuses, and what ours and the releases here take."""

import re
from pathlib import Path

import deepspeed
import numpy as np
import pytest
import torch

from data.bit_sums import block_sums
from ds_configs.plan import GPU, HOST
from launch.checkpoints.sums import sums_of
from launch.deepspeed_fixes.norms import sum_of_squares
from launch.machine import memory
from launch.planning.resolved_plans import resolve_on_machine
from launch.training import job
from modeling.initialization import label
from recipes import catalog
from recipes.problems import ProblemsError

# 206 billion parameters, 3.2 billion on a rank
SIZE = ["model.layers=64", "model.hidden=16384", "model.heads=128", "parallel.tp=8"]


def plan_of(config: str, stages: int, dp: int):
    recipe = catalog.load("default/sotu", [*SIZE, f"parallel.pp={stages}", f"batch.global={8 * dp}"])
    return resolve_on_machine(recipe, config, 8 * stages * dp)


def test_a_tensor_that_older_kernels_cannot_index_is_refused(monkeypatch):
    alone = plan_of("pipeline", 8, 1)
    assert 2**31 < memory.largest_master(alone) < 3.3e9
    job.check_flat_tensors(alone, GPU)
    monkeypatch.setattr(job, "version", lambda package: "2.9.1+cu128")
    with pytest.raises(ProblemsError, match=r"2.9.1\+cu128 with 3,.* master weights .*; install torch>=2.10"):
        job.check_flat_tensors(alone, GPU)
    job.check_flat_tensors(alone, HOST)
    job.check_flat_tensors(plan_of("pipeline", 8, 2), GPU)
    whole = plan_of("zero3", 1, 8)
    assert memory.largest_master(whole) == 1e9 and memory.fullest_stage(whole)[0] / 8 > 2**31, "sub-groups"
    assert memory.largest_master(plan_of("zero2_offload", 1, 1)) == 0, "by DeepSpeed's kernel of the host"


def test_kernels_of_the_releases_here_index_64_bits():
    """What docs/design.md says of them, by their sources; torch before 2.10 is refused above."""
    torchs = Path(torch.__file__).parent / "include/ATen/native/cuda"
    deepspeeds = Path(deepspeed.__file__).parent / "ops/csrc/adam"
    for file in (
        *(torchs / name for name in ("MultiTensorApply.cuh", "ForeachFunctors.cuh", "fused_adam_utils.cuh")),
        deepspeeds / "multi_tensor_apply.cuh",
    ):
        text = file.read_text()
        assert re.search(r"int64_t (chunk_size|numel_for_tensor|sizes)", text), file
        assert not re.search(r"\bint (chunk_size|numel_for_tensor|sizes|n =)", text), file


@pytest.mark.ci
def test_our_sums_and_norms_take_more():
    """Pages that are only read cost no memory."""
    flat = torch.from_numpy(np.zeros(2**31 + 515, dtype=np.float32))
    flat[5], flat[2**31 + 1], flat[-1] = 12.0, 4.0, 3.0
    assert sum_of_squares([flat]) == 13.0**2
    assert block_sums(flat).nonzero()[:, 0].tolist() == [0, 2**20]
    piece = torch.nn.Parameter(flat[-512:].view(16, 32).clone())
    label(piece, "word.weight", None)
    copied = sums_of(piece.detach().view(-1), piece, 0)
    assert torch.equal(sums_of(flat[-512:], piece, 0), copied) and copied[0] == 3.0
