"""One optimizer step of two ranks under every ZeRO stage is that of `transformers` and torch's AdamW."""

import functools
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
QUICK = [
    ("GPT2LMHeadModel", "zero1", "fp32"),
    ("GPT2LMHeadModel", "zero3", "bf16"),
    ("BertForPreTraining", "zero2", "fp32"),
    ("MegatronBertForPreTraining", "zero3", "fp32"),
]
REST = [case for case in (*WHOLE, *SUMS) if case not in QUICK]


def marked(cases):
    return [
        pytest.param(case, marks=() if case in QUICK else pytest.mark.ci, id=" ".join(case)) for case in cases
    ]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Distances of a case (model, stage, precision); one launch makes the steps of all in its tier."""

    @functools.cache
    def of_tier(quick):
        return distances(tmp_path_factory.mktemp("steps"), QUICK if quick else REST)

    return lambda case: of_tier(case in QUICK)[case]


def distances(out, whole_cases):
    cases = []
    for model, stage, precision in whole_cases:
        family, settings = MODELS[model]
        cases.append({"family": family, "ds_config": stage, "precision": precision, "settings": settings})
    (out / "cases.json").write_text(json.dumps(cases))
    launched = run_ranks(2, WORKERS / "whole_step.py", out / "steps.json", out / "cases.json")
    assert launched.returncode == 0, launched.stdout[-4000:]
    return dict(zip(whole_cases, json.loads((out / "steps.json").read_text()), strict=True))


@pytest.mark.parametrize("case", marked(WHOLE))
def test_losses_gradients_norm_and_the_clipped_update_are_theirs(steps, case):
    step = steps(case)
    assert max(step["losses"].values()) < 1e-5 and step["norm"] < 1e-5
    for kind in ("gradients", "squares", "weights"):
        assert {name: far for name, far in step[kind].items() if far > 2e-5} == {}, kind


@pytest.mark.parametrize("case", marked(SUMS))
def test_gradients_of_bf16_are_added_up_in_fp32(steps, case):
    """Added up in bf16, the light micro-batches, 4 % of the gradient, would be lost."""
    step = steps(case)
    assert step["losses"]["loss"] < 2e-3 and step["norm"] < 0.01
    assert {name: far for name, far in step["gradients"].items() if far > 0.06} == {}
