"""A model has one score, whatever layout and batch it is scored in."""

from __future__ import annotations

import json
import math

import pytest
from launching import WORKERS, run_ranks
from scored import make_run, write_long_text, write_passages

ONE = [
    dict(name="one", ds_config="zero0"),
    dict(name="batch 1", ds_config="zero0", batch=1),
    dict(name="batch 5", ds_config="zero0", batch=5),
    dict(name="bf16", ds_config="zero0", precision="bf16"),
]
TWO = [
    dict(name="tp2", ds_config="zero0", settings=["parallel.tp=2"]),
    dict(name="sequence tp2", ds_config="zero0", settings=["parallel.tp=2", "parallel.sequence=true"]),
    dict(name="tp2 zero3", ds_config="zero3", settings=["parallel.tp=2"]),
    dict(name="pp2", ds_config="pipeline", settings=["parallel.pp=2"]),
    dict(name="pp2 batch 1", ds_config="pipeline", settings=["parallel.pp=2"], batch=1),
    dict(name="dp2", ds_config="zero2"),
    dict(name="zero3", ds_config="zero3"),
    dict(name="zero3 offload", ds_config="zero3_offload"),
    dict(name="zero3 bf16", ds_config="zero3", precision="bf16"),
    dict(name="pp2 bf16", ds_config="pipeline", settings=["parallel.pp=2"], precision="bf16"),
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
    for task, reference in found["one"].items():
        other = found[name][task]
        assert other["right"] == reference["right"]
        assert other["nll"] == pytest.approx(reference["nll"], rel=2e-6)
        for figure, value in reference["figures"].items():
            assert math.isclose(other["figures"][figure], value, rel_tol=1e-6), (task, figure)


@pytest.mark.parametrize("name", ["bf16", "zero3 bf16", "pp2 bf16"])
def test_bf16_scores_alike_under_every_layout_and_unlike_fp32(name, found):
    exact, half = found["one"]["perplexity"]["figures"], found[name]["perplexity"]["figures"]
    assert half["loss_per_token"] == pytest.approx(exact["loss_per_token"], rel=2e-2)
    assert half["loss_per_token"] != exact["loss_per_token"]


def test_windows_overlap_and_logits_are_cut_where_positions_are_whole(found):
    """Otherwise the layouts would agree in nothing that the cut can change."""
    for name, scored in found.items():
        assert any(scored["overlapping"]["cut"]) == (name != "sequence tp2"), name


def test_the_model_is_neither_always_right_nor_always_wrong(found):
    """Otherwise the layouts would agree in nothing that can differ."""
    scored = found["one"]["perplexity"]
    assert sum(scored["right"]) > 0 and len({round(nll, 3) for nll in scored["nll"]}) > 3
