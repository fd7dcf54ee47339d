"""A resume proves itself: faults of reader, maps and shards are refused by name, and sound ones never."""

import json
from pathlib import Path

import pytest
from launching import WORKERS, run_ranks

from launch.checkpoints import run_checkpoints

FIRST = {  # layout: faults
    "fp16": ["loss scale", "step of Adam"],
    "bf16": ["rounded weights", "moments swapped"],
    "one": ["transposed QKV", "QKV in another order", "positions shifted", "two rows swapped"],
    "one zero3": ["moment of another tensor", "layer norm of another layer"],
}
SECOND = {
    "pp2": ["stage off by one", "tied copy"],
    "tp2": ["heads of ranks permuted", "copy of a tensor rank"],
    "dp2 zero2": ["shard twice", "shard missing"],
    "dp2 zero0": ["copy of a data rank", "step of one tensor"],
}
CASES = {
    "one": {"ds_config": "zero1"},
    "one zero3": {"ds_config": "zero3"},
    "bf16": {"ds_config": "zero1", "precision": "bf16"},
    "fp16": {"ds_config": "fp16_dynamic", "precision": "fp16"},
    "pp2": {"ds_config": "pipeline", "pp": 2, "settings": ["batch.accumulation=4"]},
    "tp2": {"ds_config": "zero1", "tp": 2},
    "dp2 zero2": {"ds_config": "zero2", "dp": 2},
    "dp2 zero0": {"ds_config": "zero0", "dp": 2},
}
REFUSED = {  # fault: what its refusal names
    "transposed QKV": "weight of layers.1.attention.qkv.weight",
    "QKV in another order": "weight of layers.1.attention.qkv.weight",
    "positions shifted": "weight of position.weight",
    "two rows swapped": "exp_avg of layers.1.mlp.expand.weight",
    "moment of another tensor": "exp_avg of layers.1.mlp.expand.weight",
    "layer norm of another layer": "exp_avg of layers.1.mlp_norm.weight",
    "moments swapped": "exp_avg of word.weight",
    "step of Adam": "adam_steps is 1, and 2 was saved",
    "step of one tensor": "rank 1: Adam corrects its bias for 1 updates, and 2 were made",
    "loss scale": "loss_scaler.cur_scale is 131072.0, and 65536.0 was saved",
    "rounded weights": "the loss of its sample is ",
    "stage off by one": "weight of layers.2.attention_norm.weight",
    "tied copy": "weight of word.weight",
    "shard twice": "exp_avg of layers.1.mlp.expand.weight",
    "shard missing": "weight of layers.1.mlp.expand.weight",
    "heads of ranks permuted": "weight of layers.1.attention.qkv.weight",
    "copy of a tensor rank": "weight of final_norm.weight",
    "copy of a data rank": "weight of layers.1.mlp.expand.weight",
}


def jobs_of(out: Path, layouts: dict, source: Path):
    return [
        {
            "name": name, "out": str(out / name), "case": CASES[name], "steps": 2, "source": str(source),
            "faults": ["sound", *faults, "sound"],
        }
        for name, faults in layouts.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Layout -> fault -> refusal."""
    out = tmp_path_factory.mktemp("proof")
    source = run_checkpoints.directory_of(out / "source" / "checkpoints", 2)
    first = {"name": "source", "out": str(out / "source"), "case": CASES["one"] | {"ds_config": "zero1"}}
    fp16 = {"name": "fp16 source", "out": str(out / "fp16 source"), "case": CASES["fp16"]}
    made = [{**each, "steps": 2, "source": None, "faults": []} for each in (first, fp16)]
    alone = jobs_of(out, FIRST, source)
    alone[0]["source"] = str(run_checkpoints.directory_of(out / "fp16 source" / "checkpoints", 2))
    # Saved by two ranks: they add up in another order than those that read.
    cut = {
        "name": "cut",
        "out": str(out / "cut"),
        "case": CASES["tp2"],
        "steps": 2,
        "source": None,
        "faults": [],
    }
    source = run_checkpoints.directory_of(out / "cut" / "checkpoints", 2)
    for ranks, jobs in ((1, made + alone), (2, [cut, *jobs_of(out, SECOND, source)])):
        file = out / f"{ranks}.json"
        file.write_text(json.dumps(jobs))
        done = run_ranks(ranks, WORKERS / "proofs.py", file, timeout=400)
        assert done.returncode == 0, done.stdout[-4000:]
    return {name: json.loads((out / name / "found.json").read_text()) for name in FIRST | SECOND}


@pytest.mark.parametrize("layout", FIRST | SECOND)
def test_faults_are_refused_and_sound_readings_are_not(found, layout):
    refusals = found[layout]
    assert refusals.pop("sound") is None
    for fault, refusal in refusals.items():
        assert refusal and REFUSED[fault] in refusal, f"{fault}: {refusal}"
