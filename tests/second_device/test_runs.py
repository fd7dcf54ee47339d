"""Runs that go on, or begin as others', on the second device: proofs, and the CPU's losses."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from launching import ROOT, WORKERS, run_ranks
from second_device.running import apart, needed, on_board

from launch.checkpoints import manifest, run_checkpoints
from launch.records.metrics import read_metrics

pytestmark = [needed, pytest.mark.ci]
SETTINGS = ("precision=fp32", "dropout.hidden=0.1", "run.check_every=1", "run.prompt=null")
SAVED = (*SETTINGS, "run.save_every=2", "run.keep_checkpoints=null")
PLACES = ("board", "cpu")


def start(
    out: Path, *words: object, settings: tuple[str, ...] = (), ranks: int = 1, place: str = "board"
) -> subprocess.CompletedProcess[str]:
    flags = [word for setting in settings for word in ("--set", setting)]
    env = on_board() if place == "board" else None
    return run_ranks(ranks, ROOT / "launch/pretrain.py", *words, *flags, "--out", out, env=env)


def train(out: Path, *words: object, **how: object) -> dict[int, float]:
    """Run pretrain.py; return the losses of its run by step."""
    done = start(out, *words, **how)
    assert done.returncode == 0, done.stdout[-4000:]
    return losses(out)


def losses(run: Path) -> dict[int, float]:
    return {step.step: step.loss for step in read_metrics(run / "metrics.jsonl").steps}


def check_losses(found: dict[int, float], expected: dict[int, float]) -> None:
    """Check that steps have the same losses; the largest difference is printed (pytest -s)."""
    assert found.keys() == expected.keys() != set()
    print("differs by at most", apart(found.values(), expected.values()))
    assert found == pytest.approx(expected, abs=2e-6)


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    """One run of six steps at each place."""
    folder = tmp_path_factory.mktemp("begun")
    words = ("--tiny", "--steps", 6, "--ds_config", "zero1")
    found = [train(folder / place, *words, settings=SAVED, place=place) for place in PLACES]
    check_losses(*found)
    return folder


@pytest.fixture
def stopped(begun, tmp_path) -> Path:
    """The checkpoint of a copy of the run there that ended after step 4."""
    shutil.copytree(begun / "board", tmp_path / "run")
    shutil.rmtree(run_checkpoints.directory_of(tmp_path / "run/checkpoints", 6))
    return run_checkpoints.directory_of(tmp_path / "run/checkpoints", 4)


def test_a_resumed_run_is_proven_and_goes_on(begun, stopped, tmp_path):
    """From ZeRO-1 into ZeRO-3 of two ranks."""
    words = ("--resume", "--ds_config", "zero3", "--set", "parallel.dp=2")
    check_losses(train(tmp_path / "run", *words, ranks=2), losses(begun / "cpu"))


def test_a_resumed_run_that_is_not_what_was_saved_is_refused(stopped, tmp_path):
    """Its checkpoint states another moment, another next step and another loss."""
    held = manifest.read(stopped)
    word = held.tensors["word.weight"]
    first, second = word.sums["exp_avg"]
    word = replace(word, sums={**word.sums, "exp_avg": (first + 1.0, second)})
    tensors = {**held.tensors, "word.weight": word}
    known = replace(held.known_loss, loss=held.known_loss.loss + 0.01)
    other = replace(held, tensors=tensors, known_loss=known, next_step=held.next_step + 1)
    manifest.write(other, stopped)
    done = start(tmp_path / "run", "--resume")
    assert done.returncode == 2, done.stdout[-4000:]
    found = "exp_avg of word.weight has sums", "the next step has other samples", "the loss of its sample is"
    assert all(said in done.stdout for said in found), done.stdout[-4000:]


def test_a_branch_goes_its_own_way(begun, tmp_path):
    words = ("--ds_config", "zero2", "--set", "schedule.kind=wsd", "--set", "schedule.wsd_decay_steps=2")
    words += ("--set", "steps=7")
    found = [
        train(tmp_path / place, "--branch", f"{begun / place}@4", *words, place=place) for place in PLACES
    ]
    check_losses(*found)
    assert found[0][6] != pytest.approx(losses(begun / "board")[6], abs=1e-3), "its rate is another"


ADAMW = {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
LOOP = {"optimizer": {"type": "AdamW", "params": ADAMW}, "gradient_clipping": 0.3}


def test_a_json_is_followed(tmp_path):
    rates = {"warmup_min_lr": 1e-4, "warmup_max_lr": 3e-3, "warmup_num_steps": 2, "total_num_steps": 6}
    scheduler = {"type": "WarmupDecayLR", "params": rates}
    config = {**LOOP, "train_batch_size": 8, "zero_optimization": {"stage": 2}, "scheduler": scheduler}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    words = ("--tiny", "--steps", 5, "--follow", tmp_path / "ds.json")
    check_losses(*(train(tmp_path / place, *words, settings=SETTINGS, place=place) for place in PLACES))


MODERNBERT = {
    "model_type": "modernbert", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "vocab_size": 509, "intermediate_size": 64, "max_position_embeddings": 64, "embedding_dropout": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("config", [None, MODERNBERT])
def test_the_modules_of_transformers_train(config, tmp_path):
    settings = (*SETTINGS, "model.implementation=transformers")
    if config:
        model = {"implementation": "transformers", "family": "masked_lm", "config": config}
        settings = (f"model={json.dumps(model)}", "data.tokenizer.kind=trained_wordpiece")
        settings += ("precision=fp32", "run.prompt=null")
    how = {"settings": settings, "ranks": 2}
    words = ("--tiny", "--steps", 4, "--ds_config", "zero3")
    check_losses(*(train(tmp_path / place, *words, **how, place=place) for place in PLACES))


def test_an_adopted_run_has_the_losses_that_it_had_itself(tmp_path):
    """Of DeepSpeed, on a CPU, saved after six steps of twelve."""
    case = {"name": "loop", "model": "gpt2", "loop": True, "micro": 3}
    case["ds"] = {**LOOP, "zero_optimization": {"stage": 1}}
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    done = run_ranks(1, WORKERS / "their_runs.py", tmp_path, tmp_path / "cases.json")
    assert done.returncode == 0, done.stdout[-4000:]
    words = ("--adopt", tmp_path / "loop", "--data_from", "next", "--recipe", "default/sotu", "--steps", 9)
    schedule = "schedule={kind: constant, warmup_steps: 0, min_lr: 0}"
    found = train(tmp_path / "ours", *words, "--ds_config", "zero2", settings=(schedule, *SETTINGS[2:]))
    theirs = json.loads((tmp_path / "loop/losses.json").read_text())
    check_losses(found, {step: theirs[step - 1] for step in (7, 8, 9)})
