"""The short steps of ZeRO 1 to 3: an overflow is found by the norm, on all ranks, whatever the layout."""

import hashlib
import inspect
import json

import pytest
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.partition_parameters import NoGatherCoalescedHandle
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from launching import WORKERS, run_ranks

from launch.deepspeed_fixes.short_steps import FlatStep, OffloadedStep, OrderedCopies, ShardedStep, SummedStep

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
    FlatStep: (DeepSpeedZeroOptimizer, "dd94c32fa845"),
    SummedStep: (BF16_Optimizer, "6b6848bcdba1"),
    OffloadedStep: (DeepSpeedZeroOptimizer, "146ba72ae7df"),
    ShardedStep: (DeepSpeedZeroOptimizer_Stage3, "5971fac9dcad"),
    OrderedCopies: (NoGatherCoalescedHandle, "89aab0f80f1a"),
}


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """What every rank did in three steps, the second with one infinity on one rank, by case."""
    out = tmp_path_factory.mktemp("infinities")
    keys = ("ds_config", "tp", "pp", "dp", "precision", "accumulation")
    (out / "cases.json").write_text(json.dumps([dict(zip(keys, c[:6], strict=True)) for c in CASES.values()]))
    launched = run_ranks(4, WORKERS / "one_infinity.py", out / "found.json", out / "cases.json", timeout=400)
    assert launched.returncode == 0, launched.stdout[-4000:]
    return dict(zip(CASES, json.loads((out / "found.json").read_text()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_one_infinity_on_one_rank_skips_the_step_on_all(spoiled, name):
    for rank in spoiled[name]:
        assert rank["skipped"] == rank["kept"] == [False, True, False]


@pytest.mark.parametrize("name", CASES)
def test_each_stage_takes_its_short_step(spoiled, name):
    assert {rank["step"] for rank in spoiled[name]} == {CASES[name][6]}


def test_equal_micro_batches_have_the_norm_of_one(spoiled):
    norms = {name: spoiled[name][0]["norms"][0] for name, case in CASES.items() if case[3] == 4}
    one = norms["zero2 dp4 in bf16"]
    assert len(norms) == 8 and all(norm == pytest.approx(one, rel=2e-3) for norm in norms.values()), norms


def test_no_run_leaves_its_products_to_the_next(spoiled):
    """ZeRO-3 replaces torch's `linear`; what runs next in the process would round otherwise."""
    assert all(rank["linear_is_torch's"] for ranks in spoiled.values() for rank in ranks)


@pytest.mark.parametrize("ours", UPSTREAM, ids=lambda kind: kind.__name__)
def test_deepspeed_has_what_the_short_steps_replace(ours):
    """Of DeepSpeed 0.19.8. If a method changed, compare it with the one that overrides it."""
    upstream, digest = UPSTREAM[ours]
    replaced = sorted(name for name in vars(ours) if hasattr(upstream, name) and not name.startswith("__"))
    sources = "".join(inspect.getsource(getattr(upstream, name)) for name in replaced)
    assert hashlib.sha256(sources.encode()).hexdigest()[:12] == digest, replaced
