"""A checkpoint's weights in parts, and runs that leave the last checkpoint out."""

import json
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launching import run
from safetensors.torch import save_file

from launch.checkpoints import weights
from launch.checkpoints.checkpoint import MARKER
from launch.generation.sample import sample
from launch.training.export import choose_checkpoint
from recipes import catalog


def named_tensors(count, floats=1000):
    """Of 4 x `floats` bytes each, made when they are asked for, in memory that tracemalloc sees."""
    for i in range(count):
        yield f"layers.{i}.weight", torch.from_numpy(np.full(floats, i, np.float32))


def test_weights_are_written_in_parts_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "PART_BYTES", 12_000)  # three tensors
    (tmp_path / "weights-stage-00.safetensors").write_bytes(b"of an earlier version")
    weights.write_parts(named_tensors(9), tmp_path, "weights-stage-00")
    weights.write_parts(named_tensors(8), tmp_path, "weights-stage-00")
    weights.write_parts(
        [("head", torch.ones(5000)), ("bias", torch.ones(1))], tmp_path, "weights-stage-01"
    )  # one is above the limit
    names = [p.name for p in sorted(tmp_path.iterdir())]
    assert names == [
        f"weights-stage-{s}.safetensors"
        for s in ("00-part-000", "00-part-001", "00-part-002", "01-part-000", "01-part-001")
    ]
    assert all(p.stat().st_size < 12_000 + 1000 for p in tmp_path.glob("*-00-*"))
    read = weights.load_tensors(tmp_path)
    assert list(read) == [*(f"layers.{i}.weight" for i in range(8)), "head", "bias"]
    assert all(torch.equal(read[name], tensor) for name, tensor in named_tensors(8))


def test_one_file_per_stage_is_still_read(tmp_path):
    for stage, name in enumerate(("word.weight", "final_norm.weight")):
        save_file({name: torch.full((3,), stage)}, tmp_path / f"weights-stage-{stage:02d}.safetensors")
    assert {name: int(tensor[0]) for name, tensor in weights.load_tensors(tmp_path).items()} == {
        "word.weight": 0,
        "final_norm.weight": 1,
    }


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_noticed(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(weights, "PART_BYTES", 4000)
    weights.write_parts(named_tensors(3), tmp_path, "weights-stage-00")
    (tmp_path / f"weights-stage-00-part-{missing:03d}.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds 2 of the (3|more) parts of weights-stage-00"):
        weights.load_tensors(tmp_path)


class OneRank:
    """What `save_weights` asks of an engine without ZeRO and of its grid; the weights are bfloat16."""

    def __init__(self, count, floats):
        self.module = torch.nn.ParameterList(
            torch.nn.Parameter(torch.ones(floats, dtype=torch.bfloat16)) for _ in range(count)
        )
        for i, parameter in enumerate(self.module):
            parameter.canonical_name, parameter.shard = f"layers.{i}.weight", None
        self.at = SimpleNamespace(tp=0, pp=0, dp=0)


def test_saving_holds_a_part_and_a_tensor_at_most(tmp_path, monkeypatch):
    """Of 40 tensors of 1 MB each, written in parts of 4 MB."""
    tensor, part = 1_000_000, 4_000_000
    monkeypatch.setattr(weights, "PART_BYTES", part)
    monkeypatch.setattr(
        weights, "_master_weight", lambda p: torch.from_numpy(np.full(p.numel(), 1, np.float32))
    )  # seen by tracemalloc
    rank = OneRank(40, tensor // 4)
    tracemalloc.start()
    try:
        weights.save_weights(rank, rank, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(list(tmp_path.glob(weights.PATTERN))) == 10
    assert part < peak < part + tensor + tensor // 4, peak


# --- no checkpoint of the last step


def test_without_a_checkpoint_every_reader_says_which_key_keeps_one(tmp_path):
    recipe = catalog.load(overrides=["run.save_last=false", "run.save_every=0"], tiny=True)
    (tmp_path / "recipe.yaml").write_text(catalog.dump(recipe))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(
        ValueError,
        match="with run.save_last=false the run saves only when it is stopped; .*--set run.save_last=true",
    ):
        choose_checkpoint(tmp_path, recipe, None)
    not_sampled = (
        "not sampled: there is no checkpoint of the last step (run.save_last=false); "
        "--set run.save_last=true keeps one"
    )
    assert recipe.run.prompt and sample(recipe, tmp_path / "checkpoints", None) == not_sampled
    earlier = tmp_path / "checkpoints" / "step-000007"
    earlier.mkdir()
    (earlier / MARKER).write_text(json.dumps({"step": 7, "data": {}, "files": {}}))
    final = sample(recipe, tmp_path / "checkpoints", None)
    assert final == not_sampled, "a sample is by the final weights"
    assert choose_checkpoint(tmp_path, recipe, None).step == 7


@pytest.mark.long
def test_a_row_that_only_times_iterations_leaves_results_and_no_checkpoint(tmp_path):
    out = tmp_path / "run"
    done = run([
        sys.executable, "launch/pretrain.py", "--recipe", "megatron_paper_table1/1.2b-mp", "--tiny",
        "--steps", "4", "--ds_config", "zero1", "--set", "run.prompt=We", "--out", str(out),
    ])  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert not any((out / "checkpoints").iterdir()) and "checkpoints/" not in done.stdout
    assert (
        "metrics.jsonl; no checkpoint" in done.stdout and "not sampled: there is no checkpoint" in done.stdout
    )
    assert json.loads((out / "result.json").read_text())["status"] == "ok"
