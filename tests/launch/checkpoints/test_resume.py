"""Stopping, being killed and resuming: bit for bit."""

import json
import math
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from launching import ROOT, WORKERS, environment, run, run_ranks
from stored import checksum, complete_checkpoints

from launch.checkpoints import manifest
from launch.checkpoints.run_checkpoints import newest
from launch.records.metrics import read_metrics

RAMP = "batch.rampup={start: 2, increment: 2, samples: 30}"
TWO_RANKS = {
    "zero0": ("zero0", 1, 1, 2, "fp32", []),
    "zero1": ("zero1", 1, 1, 2, "bf16", []),
    "zero2": ("zero2", 1, 1, 2, "bf16", ["batch.accumulation=2"]),
    "zero3": ("zero3", 1, 1, 2, "bf16", []),
    "zero2_offload": ("zero2_offload", 1, 1, 2, "fp32", []),
    "compiled-adam-late": ("OUT/compiled-adam.json", 1, 1, 2, "fp32", []),
    # Resumed in mid-ramp: 5 steps of 2 samples, 3 of 4.
    "zero3_offload": ("zero3_offload", 1, 1, 2, "bf16", ["activation_checkpointing=full", RAMP]),
    "tensor-zero3": ("zero3", 2, 1, 1, "fp32", ["activation_checkpointing=2"]),
    "pipeline": ("pipeline", 1, 2, 1, "bf16", ["batch.accumulation=4", RAMP]),
    "pure-bf16": ("pure_bf16", 1, 1, 2, "bf16", []),
    # Its loss scale doubles after every third step: a scaler that starts afresh is seen.
    "fp16": ("OUT/fp16.json", 1, 1, 2, "fp16", []),
    "bert": ("zero1", 1, 1, 2, "bf16", ["batch.accumulation=2"]),
    "bert-pipeline": ("pipeline", 1, 2, 1, "fp32", ["model.layer_norm=post", "model.sentence_head=nsp"]),
    # Each rank reads files of its own, shuffled; the checkpoint holds the places of both.
    "stream": ("zero2", 1, 1, 2, "bf16", [
        "data={source: jsonl, name: OUT/*.jsonl, streaming: true, validation_every: 5, shuffle_buffer: 40, "
        "tokenizer: {kind: gpt2}}",
        "model.vocab_size=50257", RAMP,
    ]),
}  # fmt: skip
QUICK = (
    "zero3_offload",
)  # in the first tier: a ramp, recomputation, the host's optimizer and bf16 in one run
# The same ways to save and load as above, in other combinations.
IN_LONG = (
    *("zero0", "zero1", "zero2", "zero3", "zero2_offload", "compiled-adam-late", "bert", "bert-pipeline"),
    *("stream", "tensor-zero3"),
)
REPEATED = {name: TWO_RANKS.pop(name) for name in IN_LONG}
OTHERS = {name: case for name, case in TWO_RANKS.items() if name not in QUICK}
FOUR_RANKS = {
    "tensor-data-zero2": ("zero2", 2, 1, 2, "bf16", []),
    "tensor-pipeline": ("3d", 2, 2, 1, "bf16", ["batch.accumulation=2"]),
    "tensor-data-zero3": ("zero3_offload", 2, 1, 2, "bf16", []),
}


def resume_cases(tmp_path_factory, ranks, table):
    out = tmp_path_factory.mktemp("resume")
    keys = ("ds_config", "tp", "pp", "dp", "precision", "settings")
    cases = [{"name": name, **dict(zip(keys, values, strict=True))} for name, values in table.items()]
    config = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    config["fp16"] |= {"initial_scale_power": 4, "loss_scale_window": 3}
    (out / "fp16.json").write_text(json.dumps(config))
    config = json.loads((ROOT / "ds_configs" / "zero2_offload.json").read_text())
    config["optimizer"] = {"params": {"torch_adam": False}}
    (out / "compiled-adam.json").write_text(json.dumps(config))
    for case in cases:
        case["ds_config"] = case["ds_config"].replace("OUT", str(out))
        case["settings"] = [setting.replace("OUT", str(out)) for setting in case["settings"]]
    for file in range(4):
        lines = (
            json.dumps({"text": f"{file} {i} " + "some words of a text, and more. " * (9 + i)})
            for i in range(30)
        )
        (out / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    (out / "cases.json").write_text(json.dumps(cases))
    launched = run_ranks(ranks, WORKERS / "resuming.py", out, out / "cases.json", timeout=500)
    assert launched.returncode == 0, launched.stdout[-4000:]
    return {name: json.loads((out / f"{name}.json").read_text()) for name in table}


def check_equal(result, late=False):
    assert result["resumed_steps"] == (list(range(45, 61)) if late else list(range(5, 9))), (
        "resumes after the newest checkpoint"
    )
    assert result["different_steps"] == [] and result["different_weights"] == [] and result["tensors"] > 40


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return resume_cases(tmp_path_factory, 2, {name: TWO_RANKS[name] for name in QUICK})


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return resume_cases(tmp_path_factory, 2, OTHERS)


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    return resume_cases(tmp_path_factory, 2, REPEATED)


@pytest.fixture(scope="module")
def on_four_ranks(tmp_path_factory):
    return resume_cases(tmp_path_factory, 4, FOUR_RANKS)


@pytest.mark.parametrize("name", QUICK)
def test_a_resumed_run_equals_the_uninterrupted_one(quick, name):
    check_equal(quick[name])


@pytest.mark.ci
@pytest.mark.parametrize("name", OTHERS)
def test_other_resumed_runs_equal_the_uninterrupted_ones(on_two_ranks, name):
    check_equal(on_two_ranks[name])


@pytest.mark.long
@pytest.mark.parametrize("name", REPEATED)
def test_a_resumed_run_equals_the_uninterrupted_one_in_other_combinations(repeated, name):
    check_equal(repeated[name], late=name.endswith("late"))


@pytest.mark.long
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_a_resumed_run_equals_the_uninterrupted_one_on_four_ranks(on_four_ranks, name):
    check_equal(on_four_ranks[name])


# --- the command, and real signals

TINY = [
    "launch/pretrain.py",
    "--ds_config",
    "zero3_offload",
    "--tiny",
    "--set",
    "run.save_every=4",
    "--set",
    "dropout.hidden=0.1",
]


def losses(directory):
    return {r.step: r.loss for r in read_metrics(directory / "metrics.jsonl").steps}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = run([sys.executable, *TINY, "--out", str(out)])
    assert done.returncode == 0, done.stdout[-3000:]
    return out, done.stdout


def start(out, *more):
    return subprocess.Popen(
        [sys.executable, *TINY, "--out", str(out), *more], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for_steps(out, count, process):
    end = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len(losses(out)) < count:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.01)


def test_a_run_shows_plan_progress_and_result(uninterrupted):
    out, text = uninterrupted
    for expected in (
        "8 global",
        "ZeRO stage",
        "unigram",
        "step 20: validation loss",
        "sample\n",
        "result.json",
    ):
        assert expected in text
    for name in (
        "recipe.yaml",
        "ds_config.json",
        "environment.json",
        "metrics.jsonl",
        "loss.png",
        "card.png",
        "result.json",
        "tensorboard",
    ):
        assert (out / name).exists()
    row = json.loads((out / "result.json").read_text())
    assert (
        row["status"] == "ok"
        and row["steps"] == 20
        and row["losses"]["validation"]["loss"] < row["entropies"]["uniform"]
    )


@pytest.mark.long
def test_sigkill_and_resume(uninterrupted, tmp_path):
    out = tmp_path / "run"
    process = start(out)
    wait_for_steps(out, 6, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = run([sys.executable, *TINY, "--out", str(out), "--resume"])
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stdout[-3000:]
    assert losses(out) == losses(uninterrupted[0])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_saves_and_exits_with_0(uninterrupted, tmp_path, number):
    out = tmp_path / "run"
    process = start(out)
    wait_for_steps(out, 2, process)
    process.send_signal(number)
    text = process.communicate()[0]
    assert process.returncode == 0, text
    last = max(losses(out))
    assert f"{number.name}: stopped after step {last} of 20, checkpoint saved" in text and "--resume" in text
    assert newest(out / "checkpoints").step == last
    assert json.loads((out / "result.json").read_text())["status"] == "interrupted"
    resumed = run([sys.executable, *TINY, "--out", str(out), "--resume"])
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    assert losses(out) == losses(uninterrupted[0])


@pytest.mark.long
def test_a_stop_file_stops_every_rank_of_a_launch(tmp_path):
    out = tmp_path / "run"
    (out).mkdir()
    command = ["deepspeed", "--num_gpus", "2", *TINY, "--out", str(out)]
    process = subprocess.Popen(
        [os.path.join(os.path.dirname(sys.executable), command[0]), *command[1:]], cwd=ROOT,
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for_steps(out, 2, process)
    (out / "STOP").touch()
    text = process.communicate()[0]
    assert process.returncode == 0 and "STOP file: stopped after step" in text, text[-3000:]
    assert newest(out / "checkpoints").step == max(losses(out)) and not (out / "STOP").exists()


def test_another_run_is_never_overwritten(uninterrupted):
    out, _ = uninterrupted
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.name != ".lock"}
    again = run([sys.executable, *TINY, "--out", str(out)])
    assert again.returncode == 2 and "--resume" in again.stdout and "Traceback" not in again.stdout
    other = run([sys.executable, *TINY, "--set", "optimizer.lr=5e-4", "--out", str(out), "--resume"])
    assert other.returncode == 2 and "optimizer.lr" in other.stdout and "--out" in other.stdout
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.long
def test_killed_while_saving(tmp_path):
    """SIGKILL between the files and the manifest: that checkpoint is never resumed from, and removed."""
    out = tmp_path / "run"
    killed = run([sys.executable, str(WORKERS / "killed_while_saving.py"), *TINY[1:], "--out", str(out)])
    assert killed.returncode == -signal.SIGKILL, killed.stdout[-3000:]
    assert (out / "checkpoints" / "step-000008.writing").is_dir()
    assert [c.step for c in complete_checkpoints(out / "checkpoints")] == [4]
    resumed = run([sys.executable, *TINY, "--out", str(out), "--resume"])
    assert resumed.returncode == 0 and "step-000004" in resumed.stdout, resumed.stdout[-3000:]
    assert newest(out / "checkpoints").step == 20
    assert not [*(out / "checkpoints").glob("*.writing")]


# --- damaged checkpoints


class Payload:
    """Unpickled, it runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.long
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(uninterrupted, tmp_path):
    whole, _ = uninterrupted
    out = shutil.copytree(whole, tmp_path / "run")
    newest, older = (out / "checkpoints" / f"step-{step:06d}" for step in (20, 16))
    flip(newest / "rank-00000.safetensors")
    resumed = run([sys.executable, *TINY, "--out", str(out), "--resume"])
    assert resumed.returncode == 0, resumed.stdout[-3000:]
    said = " ".join(resumed.stdout.split())
    assert f"WARNING: {newest} is damaged: rank-00000.safetensors has checksum" in said
    assert "it holds word.weight" in said and f"resumed from {older}" in said
    assert losses(out) == losses(whole)
    aside = newest.with_name("step-000020.damaged-1")
    assert (aside / "manifest.json").exists(), "what is damaged is left"
    sums = [checkpoint_files(directory / "checkpoints" / newest.name) for directory in (whole, out)]
    assert sums[0] == sums[1]


def put_nan(directory):
    """Write a checkpoint anew as one of step 18, with a NaN among its weights."""
    file, held = directory / "rank-00000.safetensors", manifest.read(directory.with_name("step-000020"))
    numbers = bytearray(file.read_bytes())
    numbers[-4:] = struct.pack("<f", math.nan)
    file.write_bytes(numbers)
    progress = replace(held.progress, step=18, adam_steps=18, schedule=18)
    data = {"position": held.data["position"] * 18 // 20}
    files = {file.name: checksum(file)}
    manifest.write(replace(held, progress=progress, data=data, files=files), directory)


def checkpoint_files(directory):
    return manifest.read(directory).files


def test_where_every_checkpoint_is_damaged_a_run_is_refused_and_kept(uninterrupted, tmp_path):
    """By checksum, size, numbers, its name, and one without a manifest, whose pickle is not run."""
    whole, _ = uninterrupted
    out = shutil.copytree(whole, tmp_path / "run")
    flip(out / "checkpoints" / "step-000020" / "rank-00000.safetensors")
    os.truncate(out / "checkpoints" / "step-000016" / "rank-00000.safetensors", 1000)
    other = out / "checkpoints" / "step-000004"
    other.mkdir()
    (other / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    shutil.copytree(whole / "checkpoints" / "step-000020", out / "checkpoints" / "step-000019")
    put_nan(shutil.copytree(whole / "checkpoints" / "step-000020", out / "checkpoints" / "step-000018"))
    before = (out / "metrics.jsonl").read_bytes()
    done = run([sys.executable, *TINY, "--out", str(out), "--resume"])
    said = " ".join(done.stdout.split())
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout[-3000:]
    assert "step-000020 is damaged: rank-00000.safetensors has checksum" in said
    assert "step-000016 is damaged: rank-00000.safetensors has 1000 bytes" in said
    assert "step-000004 is damaged:" in said
    assert "step-000019 is damaged:" in said and "the step in its directory's name is 19" in said
    assert "step-000018 is damaged: rank-00000.safetensors holds numbers that are not finite" in said
    assert (out / "metrics.jsonl").read_bytes() == before and not (tmp_path / "ran").exists()


def test_a_pickle_in_the_place_of_tensors_is_not_run(uninterrupted, tmp_path):
    out = shutil.copytree(uninterrupted[0], tmp_path / "run")
    for directory in (out / "checkpoints").iterdir():
        file, size = directory / "rank-00000.safetensors", checkpoint_files(directory)
        file.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
        held = manifest.read(directory)
        manifest.write(replace(held, files={file.name: checksum(file)}), directory)
        assert size
    done = run([sys.executable, *TINY, "--steps", "22", "--out", str(out), "--resume"])
    assert done.returncode != 0 and not (tmp_path / "ran").exists(), done.stdout[-3000:]


# --- other text


@pytest.mark.long
def test_a_run_does_not_resume_with_other_text(tmp_path):
    """The same command after its file has grown: another permutation of other windows."""
    corpus = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"{i} " + "some words of a text, and more. " * 30}) for i in range(40)]
    corpus.write_text("\n".join(lines) + "\n")
    data = f"data={{source: jsonl, name: {corpus}, tokenizer: {{kind: gpt2}}}}"
    command = [
        sys.executable,
        str(ROOT / "launch" / "pretrain.py"),
        "--tiny",
        "--set",
        data,
        "--set",
        "model.vocab_size=50257",
    ]
    command += ["--ds_config", "zero1", "--steps", "2", "--out", str(tmp_path / "run")]
    assert run(command, timeout=120).returncode == 0
    corpus.write_text("\n".join([*lines, lines[0]]) + "\n")
    done = run([*command, "--resume"], timeout=120)
    assert (
        done.returncode == 2 and "have changed; restore them, or begin a new run with --out" in done.stdout
    ), done.stdout[-3000:]
