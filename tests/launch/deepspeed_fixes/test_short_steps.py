"""The short steps of ZeRO 1 to 3: an overflow is found by the norm, on all ranks, whatever the layout."""

import hashlib
import inspect
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.partition_parameters import NoGatherCoalescedHandle
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from launching import WORKERS, run_ranks

from launch.deepspeed_fixes.short_steps import (
    FlatStep,
    OffloadedStep,
    OrderedCopies,
    OrderedEnd,
    ShardedStep,
    SummedStep,
)

# configuration, tp, pp, dp, precision, accumulation, and the class that steps
CASES = {
    "zero1 tp2 dp2": ("zero1", 2, 1, 2, "fp16", 1, "FlatStep"),
    "zero2 dp4 in bf16": ("zero2", 1, 1, 4, "bf16", 1, "FlatStep"),
    "zero1 tp2 pp2": ("3d", 2, 2, 1, "fp16", 1, "FlatStep"),
    "zero1 pp2 dp2": ("pipeline", 1, 2, 2, "fp16", 1, "FlatStep"),
    "zero0 tp2 dp2": ("zero0", 2, 1, 2, "fp16", 1, "MasterWeights"),
    "zero3 tp2 dp2": ("zero3", 2, 1, 2, "fp16", 1, "ShardedStep"),
    "zero2 offload tp2 dp2": ("zero2_offload", 2, 1, 2, "fp16", 1, "OffloadedStep"),
    "zero3 offload dp4 in bf16": ("zero3_offload", 1, 1, 4, "bf16", 1, "ShardedStep"),
    "zero1 tp2 dp2 with sums": ("zero1", 2, 1, 2, "bf16", 2, "SummedStep"),
    "zero1 tp2 pp2 with sums": ("3d", 2, 2, 1, "bf16", 3, "SummedStep"),
    "zero1 pp2 dp2 with sums": ("pipeline", 1, 2, 2, "bf16", 2, "SummedStep"),
    "zero0 dp4 with sums": ("zero0", 1, 1, 4, "bf16", 2, "MasterWeights"),
    "zero1 dp4 with sums": ("zero1", 1, 1, 4, "bf16", 2, "SummedStep"),
    "zero2 dp4 with accumulation": ("zero2", 1, 1, 4, "fp16", 2, "FlatStep"),
    "zero2 dp4 with sums": ("zero2", 1, 1, 4, "bf16", 2, "FlatStep"),
    "zero2 offload dp4 with sums": ("zero2_offload", 1, 1, 4, "bf16", 2, "OffloadedStep"),
    "zero3 offload dp4 with sums": ("zero3_offload", 1, 1, 4, "bf16", 2, "ShardedStep"),
}
UPSTREAM = {
    OrderedEnd: (DeepSpeedZeroOptimizer, "26ceef6d75b3"),
    FlatStep: (DeepSpeedZeroOptimizer, "d14a0005168a"),
    SummedStep: (BF16_Optimizer, "6b6848bcdba1"),
    OffloadedStep: (DeepSpeedZeroOptimizer, "998293221b00"),
    ShardedStep: (DeepSpeedZeroOptimizer_Stage3, "5971fac9dcad"),
    OrderedCopies: (NoGatherCoalescedHandle, "89aab0f80f1a"),
}


QUICK = (
    *("zero1 tp2 dp2", "zero1 pp2 dp2", "zero0 tp2 dp2", "zero3 tp2 dp2", "zero2 offload tp2 dp2"),
    *("zero1 dp4 with sums", "zero2 dp4 in bf16"),
)


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([*CASES], marks=pytest.mark.ci)], ids=["quick", "every"]
)
def test_one_infinity_on_one_rank_skips_the_step_on_all(names, tmp_path):
    """Three steps each, the second with one infinity on one rank."""
    keys = ("ds_config", "tp", "pp", "dp", "precision", "accumulation")
    cases = [dict(zip(keys, CASES[name], strict=False)) for name in names]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    how = (tmp_path / "found.json", tmp_path / "cases.json")
    launched = run_ranks(4, WORKERS / "one_infinity.py", *how, timeout=400)
    assert launched.returncode == 0, launched.stdout[-4000:]
    found = dict(zip(names, json.loads((tmp_path / "found.json").read_text()), strict=True))
    for name, ranks in found.items():
        for rank in ranks:
            assert rank["skipped"] == rank["kept"] == [False, True, False], name
            assert rank["step"] == CASES[name][6], name
            # ZeRO-3 replaces torch's `linear`; what runs next in the process would round otherwise.
            assert rank["linear_is_torch's"], name
    norms = {name: ranks[0]["norms"][0] for name, ranks in found.items() if CASES[name][3] == 4}
    one = norms["zero2 dp4 in bf16"]
    assert len(norms) == (2 if names is QUICK else 8)
    assert all(norm == pytest.approx(one, rel=2e-3) for norm in norms.values()), norms


@pytest.mark.parametrize("ours", UPSTREAM, ids=lambda kind: kind.__name__)
def test_deepspeed_has_what_the_short_steps_replace(ours):
    """Of DeepSpeed 0.19.8. If a method changed, compare it with the one that overrides it."""
    upstream, digest = UPSTREAM[ours]
    replaced = sorted(name for name in vars(ours) if hasattr(upstream, name) and not name.startswith("__"))
    sources = "".join(inspect.getsource(getattr(upstream, name)) for name in replaced)
    assert hashlib.sha256(sources.encode()).hexdigest()[:12] == digest, replaced


def test_a_rank_with_padding_alone_has_sums_of_zero():
    """No gradient ever came there: with many ranks, a group of biases and norms leaves some with padding."""
    sums, master = torch.zeros(1), torch.nn.Parameter(torch.zeros(1))
    alone = SimpleNamespace(
        averaged_gradients={},
        single_partition_of_fp32_groups=[master],
        _use_compact_grad_partition_buffer=lambda group: True,
        _build_compact_grad_partition_buffer=lambda group: SimpleNamespace(flat_partition=sums),
    )
    alone._get_compact_grad_partition_buffer = partial(FlatStep._get_compact_grad_partition_buffer, alone)
    FlatStep._complete(alone, 0)
    assert master.grad is sums
