"""The fp16 loss scaler, for real: two ranks, under ZeRO 1-3, offload, tensor and pipeline parallelism.

ZeRO-0 is held against ZeRO-1 bit by bit, with a scale that moves, in test_zero0.py; here only its end at the
smallest scale.
"""

import itertools
import json

import pytest
from launching import WORKERS, run_ranks

LAYOUTS = {
    "zero1": ("zero1", 1, 1, 2),
    "zero2": ("zero2", 1, 1, 2),
    "zero3": ("zero3", 1, 1, 2),
    "zero3_offload": ("zero3_offload", 1, 1, 2),
    "tensor": ("zero1", 2, 1, 1),
    "pipeline": ("pipeline", 1, 2, 1),
}
WINDOW, HYSTERESIS = 3, 2
# 2^26 overflows for the tiny model, about 2^18 does not: the run sees hysteresis, back-off and growth.
MOVING = {"loss_scale": 0, "initial_scale_power": 22, "loss_scale_window": WINDOW, "hysteresis": HYSTERESIS}
MOVING |= {"min_loss_scale": 1}
GROWING = {**MOVING, "initial_scale_power": 7, "loss_scale_window": 2}
FLOOR = {**MOVING, "initial_scale_power": 31, "min_loss_scale": 2**30}
STATIC = {"loss_scale": 2.0**31}
GOOD_STATIC = {"loss_scale": 512.0}


TWO_RANKS = {"tp": 1, "pp": 1, "dp": 2}
KINDS = {"moving": (MOVING, 14), "floor": (FLOOR, 8), "growing": (GROWING, 8), "fixed": (GOOD_STATIC, 8)}
REPEATED = ("zero2", "zero3", "zero3_offload", "tensor", "pipeline")  # of the second tier
EVERY = [
    pytest.param(name, marks=pytest.mark.long if name in REPEATED else pytest.mark.ci) for name in LAYOUTS
]


def run_cases(out, layouts, more=()):
    """Steps and problem of every case, by name: the layouts under every kind of loss scale."""
    keys, cases = ("ds_config", "tp", "pp", "dp"), [*more]
    for name in layouts:
        layout = dict(zip(keys, LAYOUTS[name], strict=True))
        for kind, (fp16, steps) in KINDS.items():
            cases.append({"name": f"{name}-{kind}", **layout, "fp16": fp16, "steps": steps})
    (out / "cases.json").write_text(json.dumps(cases))
    launched = run_ranks(2, WORKERS / "loss_scaling.py", out, out / "cases.json", timeout=400)
    assert launched.returncode == 0, launched.stdout[-4000:]
    return {c["name"]: json.loads((out / f"{c['name']}.result.json").read_text()) for c in cases}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    floor = {"name": "zero0-floor", "ds_config": "zero0", **TWO_RANKS, "fp16": FLOOR, "steps": 8}
    return run_cases(tmp_path_factory.mktemp("fp16"), ["zero1"], [floor])


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    stuck = {"name": "zero1-stuck", "ds_config": "zero1", **TWO_RANKS, "fp16": STATIC, "steps": 30}
    return run_cases(tmp_path_factory.mktemp("fp16"), REPEATED, [stuck])


@pytest.fixture
def results(request, quick):
    layout = getattr(request.node, "callspec", None) and request.node.callspec.params.get("layout")
    return {**quick, **request.getfixturevalue("repeated")} if layout in REPEATED else quick


def expected_scales(skipped, first, floor):
    """The scale of each step by the rules of the JSON, from which steps overflowed."""
    scale, credit, good = first, HYSTERESIS, 0
    for overflowed in skipped:
        yield scale
        if overflowed:
            good = 0
            if credit == 1:
                scale = max(scale / 2, floor)
            else:
                credit -= 1
        else:
            good += 1
            if good > 1 and (good - 1) % WINDOW == 0:  # DeepSpeed counts from the second good step on
                scale, credit = scale * 2, HYSTERESIS


@pytest.mark.parametrize("layout", EVERY)
def test_the_scale_moves_as_the_json_says(results, layout):
    steps = results[f"{layout}-moving"]["steps"]
    skipped = [s["skipped"] for s in steps]
    assert [s["scale"] for s in steps] == list(expected_scales(skipped, 2.0**22, 1.0))
    assert skipped[0] and not all(skipped), "the case must see overflow and good steps"
    assert any(b["scale"] > a["scale"] for a, b in zip(steps, steps[1:], strict=False)), "and growth"


@pytest.mark.parametrize("layout", EVERY)
def test_a_skipped_step_changes_neither_schedule_nor_weights(results, layout):
    steps = results[f"{layout}-moving"]["steps"]
    fixed = results[f"{layout}-fixed"]["steps"]
    for a, b in zip(steps, steps[1:], strict=False):
        assert (a["lr"] == b["lr"]) == a["skipped"]
    # Before the first good step nothing has changed, so that the losses are those of the untrained model; the
    # static run's first step has lr 0, which gives it one more batch of untrained losses to compare with.
    assert steps[0]["loss"] == pytest.approx(fixed[0]["loss"], abs=2e-4)
    assert steps[1]["loss"] == pytest.approx(fixed[1]["loss"], abs=2e-4)


@pytest.mark.parametrize("layout", EVERY)
def test_norm_and_loss_do_not_depend_on_the_scale(results, layout):
    """Loss and norm are those of unscaled gradients, also in and after steps at which the scale grows.

    Layouts near the largest fp16 number may overflow in different steps, after which they see different
    batches: compared are the steps up to there, for a fixed scale all.
    """
    for kind in ("moving", "fixed"):
        ours, reference = results[f"{layout}-{kind}"]["steps"], results[f"zero1-{kind}"]["steps"]
        pairs = zip(ours, reference, strict=True)
        same = itertools.takewhile(lambda pair: pair[0]["skipped"] == pair[1]["skipped"], pairs)
        good = [(a, b) for a, b in same if not a["skipped"]]
        assert len(good) >= (8 if kind == "fixed" else 3)
        for a, b in good:
            assert a["loss"] == pytest.approx(b["loss"], abs=2e-3)
            assert a["norm"] == pytest.approx(b["norm"], rel=2e-2)


@pytest.mark.parametrize("layout", EVERY)
def test_a_growing_scale_changes_nothing_but_itself(results, layout):
    """Scales are powers of two: a run whose scale grows equals one whose scale is fixed.

    DeepSpeed 0.19.8 alone unscales with the doubled scale in the step at which it grows, which halves that
    step's gradients.
    """
    growing, fixed = results[f"{layout}-growing"]["steps"], results[f"{layout}-fixed"]["steps"]
    assert growing[-1]["scale"] >= 4 * growing[0]["scale"] and not any(s["skipped"] for s in growing)
    for a, b in zip(growing, fixed, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
        assert a["norm"] == pytest.approx(b["norm"], rel=1e-3)


@pytest.mark.parametrize("layout", [pytest.param("zero0", marks=pytest.mark.ci), *EVERY])
def test_a_scale_at_its_floor_stops_the_run(results, layout):
    result = results[f"{layout}-floor"]
    assert len(result["steps"]) < 8
    for said in ("smallest allowed loss scale, 1.07374e+09", "fp16.min_loss_scale", "bf16", "--resume"):
        assert said in result["problem"]


@pytest.mark.long
def test_a_static_scale_that_always_overflows_stops_the_run(repeated):
    result = repeated["zero1-stuck"]
    assert len(result["steps"]) == 20 and all(s["skipped"] for s in result["steps"])
    assert "20 steps in a row overflowed" in result["problem"] and "fp16.loss_scale" in result["problem"]
