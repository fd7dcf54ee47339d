"""Gradients of many micro-batches are summed in fp32 where a run is in bf16, under every stage."""

import json

import pytest
from launching import WORKERS, run_ranks

MANY = 256
STAGES = {"zero0": 1, "zero1": 1, "zero2": 1, "zero3": 1, "zero2_offload": 1, "pipeline": 2}


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    """Gradient norm by (configuration, accumulation, type of the sums)."""
    out = tmp_path_factory.mktemp("sums")
    cases = {(name, count, "auto"): pp for name, pp in STAGES.items() for count in (1, MANY)}
    cases[("zero1", MANY, "bf16")] = 1
    keys = ("ds_config", "accumulation", "sums")
    given = [{**dict(zip(keys, case, strict=True)), "pp": pp} for case, pp in cases.items()]
    (out / "cases.json").write_text(json.dumps(given))
    launched = run_ranks(2, WORKERS / "gradient_sums.py", out / "norms.json", out / "cases.json")
    assert launched.returncode == 0, launched.stdout[-4000:]
    return dict(zip(cases, json.loads((out / "norms.json").read_text()), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("name", STAGES)
def test_the_mean_of_equal_micro_batches_is_one_of_them(norms, name):
    assert norms[name, MANY, "auto"] == pytest.approx(norms[name, 1, "auto"], rel=1e-4)


@pytest.mark.long
def test_sums_in_bf16_are_off_by_a_percent(norms):
    """Or the test above says nothing."""
    assert norms["zero1", MANY, "bf16"] != pytest.approx(norms["zero1", 1, "auto"], rel=0.01)
