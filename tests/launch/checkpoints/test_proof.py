"""A resume proves itself: faults of reader, maps and shards are refused by name, and sound ones never."""

import json
from pathlib import Path

import pytest
import torch
from launching import WORKERS, run_ranks

from launch.checkpoints import run_checkpoints
from launch.checkpoints.geometry import share
from launch.checkpoints.proof import squares_of
from launch.checkpoints.sums import sums_of
from modeling.initialization import Shard, label

STALE = "next number of the model's weight"
FIRST = {  # layout: faults
    "fp16": ["loss scale", "step of Adam"],
    "bf16": ["rounded weights", "moments swapped", "initial weights", "transposed initial weights"],
    "one": [
        "transposed QKV",
        "QKV in another order",
        "positions shifted",
        "two rows swapped",
        "without sums",
        "without a sum of the step",
        "a batch on, of another seed",
    ],
    "one zero3": ["moment of another tensor", "layer norm of another layer", STALE],
}
SECOND = {
    "pp2": ["stage off by one", "tied copy"],
    "tp2": ["heads of ranks permuted", "copy of a tensor rank", "a batch on"],
    "dp2 zero2": ["shard twice", "shard missing", STALE, "a batch on", "dropout of the step before"],
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
IN_EVERY_PRECISION = {  # of one rank; each of `proofs.TABLE`
    "fp32": {"ds_config": "zero1"},
    "fp16": {"ds_config": "fp16_dynamic", "precision": "fp16"},
    "bf16": {"ds_config": "zero2", "precision": "bf16"},
    "pure bf16": {"ds_config": "pure_bf16", "precision": "bf16"},
}
REFUSED = {  # fault: what its refusal names
    "without sums": "holds no sums and no loss: what was read of it is not proven",
    "without a sum of the step": "holds no sum of the next step: its data are not proven",
    "transposed initial weights": "weight of layers.1.attention.qkv.weight",
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
    STALE: "the model's weights are not its master weights in layers.1.mlp.expand.weight",
    "a batch on": "rank 1: the next step has other samples or other dropout than the step after the save",
    "dropout of the step before": "the next step has other samples or other dropout",
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
            "name": name, "out": str(out / name), "case": CASES[name], "source": str(source),
            "steps": 3 if name == "pp2" else 2,  # stages exchange longer samples after the one of the proof
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
    for sound in ("sound", "initial weights", "a batch on, of another seed"):
        assert refusals.pop(sound, None) is None, sound
    for fault, refusal in refusals.items():
        assert refusal and REFUSED[fault] in refusal, f"{fault}: {refusal}"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Precision -> fault -> refusal."""
    out = tmp_path_factory.mktemp("table")
    settings = ["run.save_every=1", "run.keep_checkpoints=2", "dropout.hidden=0.1"]
    jobs = []
    for name, case in IN_EVERY_PRECISION.items():
        made = {"name": name, "out": str(out / "made" / name), "case": {**case, "settings": settings}}
        source = run_checkpoints.directory_of(out / "made" / name / "checkpoints", 2)
        jobs.append({**made, "steps": 2, "source": None, "faults": []})
        faults = {"source": str(source), "faults": ["sound", "TABLE", "sound"]}
        jobs.append({**jobs[-1], **faults, "out": str(out / name)})
    file = out / "jobs.json"
    file.write_text(json.dumps(jobs))
    done = run_ranks(1, WORKERS / "proofs.py", file, timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]
    return {name: json.loads((out / name / "found.json").read_text()) for name in IN_EVERY_PRECISION}


def test_each_fault_is_noticed_in_every_precision(table):
    for fault in table["fp32"]:
        noticed = [f"{name}: {bool(found[fault])}" for name, found in table.items()]
        print(f"{fault:40} {', '.join(noticed)}")
    for precision, refusals in table.items():
        assert refusals.pop("sound") is None, precision
        passed = [fault for fault, refusal in refusals.items() if not refusal]
        assert len(refusals) == 16 and not passed, (precision, passed)


@pytest.mark.parametrize(("dim", "ranks", "parts"), [(0, 1, 3), (0, 2, 5), (1, 3, 4), (0, 4, 1)])
def test_sums_are_those_of_any_pieces(dim, ranks, parts):
    full = torch.randn(13, 6, generator=torch.Generator().manual_seed(1))
    found = torch.zeros(2, dtype=torch.float64)
    for rank in range(ranks):
        shard = Shard(dim, rank, ranks, 16 if dim == 0 else None, full.shape[dim])  # rows are padded
        numbers = shard.of(full).view(-1)
        parameter = labelled(shard.of(full), shard)
        for part in range(parts):
            first, count = share(len(numbers), part, parts)
            found += sums_of(numbers[first : first + count], parameter, first)
    assert torch.allclose(found, sums_of(full.view(-1), labelled(full, None), 0), rtol=1e-13)


def labelled(numbers, shard):
    parameter = torch.nn.Parameter(numbers)
    label(parameter, "word.weight", shard)
    return parameter


def test_sums_of_a_transposed_or_permuted_tensor_are_others():
    full = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    first, second = sums_of(full.view(-1), labelled(full, None), 0).tolist()
    for other in (full.t(), full.flip(0), full.roll(1, 1), full.view(2, 4, 8).transpose(0, 1)):
        numbers = other.reshape(-1)
        found = sums_of(numbers, labelled(full, None), 0).tolist()
        assert found[0] == pytest.approx(first, abs=1e-12) and abs(found[1] - second) > 0.01


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25, 0.0])
def test_squares_of_any_size_bound_the_rounding_of_a_sum(size):
    assert squares_of(torch.full((1000,), size)).item() == pytest.approx(1000 * size**2, rel=1e-5, abs=0)
