"""ZeRO-0 in bf16 and fp16 against ZeRO-1, to the last bit: the same step without and with sharded states."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from launching import WORKERS, run_ranks

from launch.deepspeed_fixes import zero0
from launch.deepspeed_fixes.zero0 import MasterWeights

# 2^20 overflows for the tiny model, 2^18 does not: the run sees hysteresis, back-off and growth.
MOVING = {"loss_scale": 0, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 2}
MOVING |= {"min_loss_scale": 1}
# name: (tp, dp, precision, settings)
FAST = {"data bf16": (1, 2, "bf16", []), "tensor fp16": (2, 1, "fp16", [])}
ONE_RANK = {"bf16": (1, 1, "bf16", []), "fp16": (1, 1, "fp16", [])}
TWO_RANKS = {
    "data fp16": (1, 2, "fp16", []),
    "tensor bf16": (2, 1, "bf16", []),
    "unclipped": (1, 2, "bf16", ["optimizer.clip=0", "batch.accumulation=1"]),
    "bert": (2, 1, "bf16", []),
}
FOUR_RANKS = {"tensor data bf16": (2, 2, "bf16", []), "tensor data fp16": (2, 2, "fp16", [])}
RESUMED = {
    "resumed bf16": (1, 2, "bf16", ["batch.accumulation=2"]),
    "resumed fp16": (1, 2, "fp16", ["batch.accumulation=2"]),
    "resumed tensor fp16": (2, 1, "fp16", []),
}


def trained(out, ranks, table, resumed=()):
    """Results by name of the cases of `table` and of those of `resumed`, all trained by one launch."""
    keys = ("tp", "dp", "precision", "settings")
    more = {name: {"fp16": MOVING} for name in table}
    more |= {name: {"ds_config": "zero0", "pp": 1, "resumed": True} for name in resumed}
    cases = [
        {"name": name, **more[name], **dict(zip(keys, values, strict=True))}
        for name, values in {**table, **dict(resumed)}.items()
    ]
    (out / "cases.json").write_text(json.dumps(cases))
    launched = run_ranks(ranks, WORKERS / "zero0.py", out, out / "cases.json", timeout=400)
    assert launched.returncode == 0, launched.stdout[-4000:]
    return {case["name"]: json.loads((out / f"{case['name']}.json").read_text()) for case in cases}


def check_equal(result, precision, clips=True):
    """Loss, learning rate, loss scale and skips of every step, and the last fp32 weights, are equal."""
    plain, sharded = result["zero0"], result["zero1"]
    assert plain["steps"] == sharded["steps"]
    assert result["different_weights"] == [] and result["tensors"] > 40
    plain_norms, sharded_norms = ([n for n in run["norms"] if math.isfinite(n)] for run in (plain, sharded))
    assert plain_norms == pytest.approx(sharded_norms, rel=1e-6), "before rounding"
    losses, _, norms, scales, skipped = zip(*plain["steps"].values(), strict=True)
    assert losses[-1] < losses[0] - 0.05, "the case must learn, or equal losses say little"
    if clips:
        assert max(n for n in norms if n is not None) > 0.5, "clipping at 0.5 must bite"
    if precision == "fp16":
        grows = any(b > a for a, b in zip(scales, scales[1:], strict=False))
        assert any(skipped) and not all(skipped) and grows
    else:
        assert set(scales) == {1.0} and not any(skipped)


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("zero0"), 2, FAST)


@pytest.mark.ci
@pytest.mark.parametrize("name", FAST)
def test_trains_like_zero_1(fast, name):
    check_equal(fast[name], FAST[name][2])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ranks", "table"), [(1, ONE_RANK), (2, TWO_RANKS), (4, FOUR_RANKS)], ids=["1 rank", "2 ranks", "4 ranks"]
)
def test_every_layout_trains_like_zero_1_and_resumes_to_the_bit(tmp_path, ranks, table):
    results = trained(tmp_path, ranks, table, RESUMED if ranks == 2 else ())
    for name, (_, _, precision, _) in table.items():
        check_equal(results.pop(name), precision, clips=name != "unclipped")
    for resumed in results.values():
        assert resumed["resumed_steps"] == list(range(5, 9)), "goes on after the newest checkpoint"
        assert resumed["different_steps"] == resumed["different_weights"] == [] and resumed["tensors"] > 40


# --- the optimizer by itself


# An `mpu` without parallelism.
ONE = SimpleNamespace(get_model_parallel_rank=lambda: 0, get_model_parallel_world_size=lambda: 1)


def parameters(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((5, 3), (7,))]


def scaler(dtype=torch.bfloat16, dynamic=False, scale=1.0):
    rules = {"init_scale": scale, "scale_window": 2, "min_scale": 1.0, "delayed_shift": 2}
    rules |= {"consecutive_hysteresis": False}
    how = {"static_loss_scale": scale, "dynamic_scaling": dynamic, "dynamic_loss_args": rules}
    return loss_scaler.CreateLossScaler(dtype=dtype, **how)


def adam_of(model):
    groups = {"params": model[:1], "weight_decay": 0.5}, {"params": model[1:], "weight_decay": 0.0}
    return torch.optim.AdamW(groups, lr=0.1)


def masters_of(model, clip=0.0, skips=True, **scaling):
    scales = scaler(model[0].dtype, **scaling)
    return MasterWeights(adam_of(model), ONE, clip=clip, scaler=scales, skips_overflow=skips)


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model]


def test_steps_are_those_of_adam_in_fp32():
    """No step but ours is taken: not one on zero gradients beforehand, which would decay and count."""
    model = parameters()
    reference = [torch.nn.Parameter(p.detach().float()) for p in model]
    adam, optimizer = adam_of(reference), masters_of(model, clip=0.5)
    for step in range(3):
        for p, r, g in zip(model, reference, gradients(model, step), strict=True):
            p.grad, r.grad = g.clone(), g.float()
        norm = torch.nn.utils.clip_grad_norm_(reference, 0.5)
        adam.step()
        optimizer.step()
        assert float(optimizer._global_grad_norm) == pytest.approx(float(norm), rel=1e-6) and norm > 0.5
        for (p, master), r in zip(optimizer.pairs, reference, strict=True):
            torch.testing.assert_close(master, r.detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(p, master.bfloat16()) and p.grad is None


@pytest.mark.parametrize("steps", ["only then", "always"])
def test_a_parameter_without_a_gradient_counts_as_zero(steps):
    """As by DeepSpeed; a second micro-batch may bring the one that the first did not."""
    model = parameters()
    optimizer = masters_of(model)
    first, second = gradients(model, 0)
    model[0].grad = first.clone()
    optimizer.take_gradients()
    if steps == "always":
        model[0].grad, model[1].grad = first.clone(), second.clone()
        optimizer.take_gradients()
    expected = (
        [first.float(), torch.zeros(7)] if steps == "only then" else [2 * first.float(), second.float()]
    )
    for (_, master), total in zip(optimizer.pairs, expected, strict=True):
        assert torch.equal(master.grad, total)


def test_a_loss_scale_cancels():
    """Unscaling is exact for powers of two, also where clipping bites."""
    plain, scaled = parameters(torch.float16), parameters(torch.float16)
    optimizers = masters_of(plain, clip=0.5), masters_of(scaled, clip=0.5, scale=64.0)
    for p, s, g in zip(plain, scaled, gradients(plain, 0), strict=True):
        p.grad, s.grad = g.clone(), 64 * g
    for optimizer in optimizers:
        optimizer.step()
    assert float(optimizers[0]._global_grad_norm) == float(optimizers[1]._global_grad_norm)
    for (_, p), (_, s) in zip(*(optimizer.pairs for optimizer in optimizers), strict=True):
        assert torch.equal(p, s)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_changes_no_weight(bad):
    model = parameters()
    before = copy.deepcopy([p.detach() for p in model])
    optimizer = masters_of(model, clip=0.5)
    for p, g in zip(model, gradients(model, 0), strict=True):
        p.grad = g
    model[1].grad[3] = bad
    optimizer.step()
    assert optimizer.overflow and optimizer._global_grad_norm == math.inf and not optimizer.state
    for (p, master), b in zip(optimizer.pairs, before, strict=True):
        assert torch.equal(p, b) and torch.equal(master, b.float())


def test_bf16_does_not_skip_where_the_json_forbids_it():
    """bf16.check_grad_overflow=false: the run shows its NaN instead of standing still."""
    model = parameters()
    optimizer = masters_of(model, skips=False)
    for p in model:
        p.grad = torch.full_like(p, math.nan)
    optimizer.step()
    assert not optimizer.overflow and model[0].isnan().all()


def test_kernels_take_all_tensors_in_their_order_in_lists_of_about_one_size(monkeypatch):
    monkeypatch.setattr(zero0, "AT_ONCE", 10)
    pairs = [(torch.nn.Parameter(torch.empty(n)), torch.empty(n)) for n in (4, 5, 3, 0, 40, 1, 9, 2)]
    lists = list(zero0._lists(pairs))
    assert [pair for each in lists for pair in zip(*each, strict=True)] == pairs
    sizes = [[len(master) for master in masters] for _, masters in lists]
    assert len(sizes) > 3 and all(sum(each[1:]) <= 10 for each in sizes), sizes
