"""A model has one score, whatever layout and batch it is scored in."""

from __future__ import annotations

import json
import math

import pytest
import torch
from launching import WORKERS, run_ranks
from scored import PASSAGES, make_run, tokenizer_of, write_long_text, write_passages
from transformers import GPT2LMHeadModel

from launch import export_hf

pytestmark = pytest.mark.ci

ONE = [
    dict(name="one"),
    dict(name="batch 1", batch=1),
    dict(name="batch 5", batch=5),
    dict(name="bf16", precision="bf16"),
]
TWO = [
    dict(name="tp2", settings=["parallel.tp=2"]),
    dict(name="dp2"),
    dict(name="tp2 bf16", settings=["parallel.tp=2"], precision="bf16"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The scores of all cases, by name."""
    folder = tmp_path_factory.mktemp("scored")
    texts, long = write_passages(folder / "texts.jsonl"), write_long_text(folder / "long.txt")
    jobs = dict(run=str(make_run(folder / "run")), texts=str(texts), long=str(long))
    for processes, cases in ((1, ONE), (2, TWO)):
        file = folder / f"jobs-{processes}.json"
        file.write_text(json.dumps({**jobs, "out": str(folder), "cases": cases}))
        done = run_ranks(processes, WORKERS / "scoring_layouts.py", file, timeout=280)
        assert done.returncode == 0, done.stdout[-6000:]
    return {case["name"]: json.loads((folder / f"{case['name']}.json").read_text()) for case in (*ONE, *TWO)}


@pytest.mark.parametrize("name", [case["name"] for case in (*ONE[1:], *TWO) if "bf16" not in case["name"]])
def test_every_layout_and_batch_gives_the_score_of_one_process(name, found):
    for task in ("perplexity", "overlapping"):
        reference = found["one"][task]
        other = found[name][task]
        assert other["right"] == reference["right"]
        assert other["nll"] == pytest.approx(reference["nll"], rel=2e-6)
        for figure, value in reference["figures"].items():
            assert math.isclose(other["figures"][figure], value, rel_tol=1e-6), (task, figure)


@pytest.mark.parametrize("name", ["bf16", "tp2 bf16"])
def test_bf16_scores_alike_under_every_layout_and_unlike_fp32(name, found):
    exact, half = found["one"]["perplexity"]["figures"], found[name]["perplexity"]["figures"]
    assert half["loss_per_token"] == pytest.approx(exact["loss_per_token"], rel=2e-2)
    assert half["loss_per_token"] != exact["loss_per_token"]


@pytest.mark.parametrize("name", ["batch 1", "batch 5", "tp2", "dp2"])
def test_every_layout_and_batch_answers_the_requests_of_lm_eval_alike(name, found):
    reference = found["one"]["requests"]
    other = found[name]["requests"]
    for kind in ("likelihoods", "rolling", "overlapping"):
        assert other[kind] == pytest.approx(reference[kind], rel=2e-6), kind
    for kind in ("right", "written", "seen"):
        assert other[kind] == reference[kind], kind


def test_requests_are_answered_as_transformers_would(found, tmp_path):
    """Continuations of two words, whole texts from an end-of-document token on, and greedy texts."""
    answers = found["one"]["requests"]
    export_hf.export(make_run(tmp_path / "run"), tmp_path / "hf")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    tokenizer = tokenizer_of(PASSAGES, model.config.vocab_size)
    limits = [9, 9, 60]
    stops = [[], ["e", "a"], ["the"]]
    for number, text in enumerate(PASSAGES):
        before = tokenizer.encode(text.rsplit(" ", 2)[0])
        tokens = tokenizer.encode(text)
        nll = losses(model, before, tokens[len(before) :])
        assert answers["likelihoods"][number] == pytest.approx(-math.fsum(nll), rel=1e-6)
        nll = losses(model, [tokenizer.eos_token_id], tokens)
        assert answers["rolling"][number] == pytest.approx(-math.fsum(nll), rel=1e-6)
        most = limits[number % 3]
        new: list[int] = []
        written = ""
        while len(new) < most and not any(stop in written for stop in stops[number % 3]):
            prompt = [*before[-max(1, 64 - most) :], *new]
            with torch.no_grad():
                new.append(int(model(torch.tensor([prompt[-64:]])).logits[0, -1].argmax()))
            if new[-1] == tokenizer.eos_token_id:
                del new[-1]
                break
            written = tokenizer.decode(new)
        for stop in stops[number % 3]:
            written = written.partition(stop)[0]
        assert answers["written"][number] == written
    assert answers["seen"] == [10, 10, 1]
    assert any(answers["written"])


def losses(model, before, after):
    """Of the tokens of `after`, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *after[:-1]]])).logits[0, len(before) - 1 :].double()
    return torch.log_softmax(logits, -1)[range(len(after)), torch.tensor(after)].neg().tolist()


def test_windows_overlap_and_logits_are_cut(found):
    """Otherwise the layouts would agree in nothing that the cut can change."""
    for name, scored in found.items():
        assert any(scored["overlapping"]["cut"]), name


def test_the_model_is_neither_always_right_nor_always_wrong(found):
    """Otherwise the layouts would agree in nothing that can differ."""
    scored = found["one"]["perplexity"]
    assert sum(scored["right"]) > 0 and len({round(nll, 3) for nll in scored["nll"]}) > 3
