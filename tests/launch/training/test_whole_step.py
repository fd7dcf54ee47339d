"""One optimizer step of two ranks under every ZeRO stage is that of `transformers` and torch's AdamW."""

import json

import pytest
from launching import WORKERS, run_ranks

MODELS = {
    "GPT2LMHeadModel": ("gpt2", ()),
    "BertForPreTraining": ("bert", ("model.layer_norm=post", "model.sentence_head=nsp")),
    "MegatronBertForPreTraining": ("bert", ("model.layer_norm=pre", "model.sentence_head=sop")),
}
STAGES = ("zero0", "zero1", "zero2", "zero3")
WHOLE = [(model, stage, "fp32") for model in MODELS for stage in STAGES]
SUMS = [("GPT2LMHeadModel", stage, "bf16") for stage in STAGES]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Distances by (model, stage, precision); one launch makes all steps."""
    out, cases = tmp_path_factory.mktemp("steps"), []
    for model, stage, precision in (*WHOLE, *SUMS):
        family, settings = MODELS[model]
        cases.append({"family": family, "ds_config": stage, "precision": precision, "settings": settings})
    (out / "cases.json").write_text(json.dumps(cases))
    launched = run_ranks(2, WORKERS / "whole_step.py", out / "steps.json", out / "cases.json")
    assert launched.returncode == 0, launched.stdout[-4000:]
    return dict(zip((*WHOLE, *SUMS), json.loads((out / "steps.json").read_text()), strict=True))


@pytest.mark.parametrize("case", WHOLE, ids=" ".join)
def test_losses_gradients_norm_and_the_clipped_update_are_theirs(steps, case):
    step = steps[case]
    assert max(step["losses"].values()) < 1e-5 and step["norm"] < 1e-5
    for kind in ("gradients", "squares", "weights"):
        assert {name: far for name, far in step[kind].items() if far > 2e-5} == {}, kind


@pytest.mark.parametrize("case", SUMS, ids=" ".join)
def test_gradients_of_bf16_are_added_up_in_fp32(steps, case):
    """Added up in bf16, the light micro-batches, 4 % of the gradient, would be lost."""
    step = steps[case]
    assert step["losses"]["loss"] < 2e-3 and step["norm"] < 0.01
    assert {name: far for name, far in step["gradients"].items() if far > 0.06} == {}
