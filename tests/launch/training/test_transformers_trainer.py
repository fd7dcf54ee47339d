"""GPT-2 of `transformers` through its Trainer: the loss curve of our own, and a run like every other."""

import json
import math
import signal
import subprocess
import sys
import time

import pytest
import torch
from launching import ROOT, WORKERS, deepspeed, environment, run, run_ranks
from stored import complete_checkpoints, load_weights

from ds_configs.findings import ConfigError
from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.checkpoints.run_checkpoints import newest
from launch.records.metrics import read_metrics
from launch.training.job import plan_job
from recipes import catalog

HF = "model.implementation=transformers"
MACHINE = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)

# --- the same numbers

# Without dropout.hidden, which our model draws otherwise than transformers' modules.
PUBLISHED_FORM = [
    "model.layers=2", "activation_checkpointing=full", "batch.accumulation=2", "dropout.hidden=0",
    "dropout.attention=0.1", "precision=fp32",
]  # fmt: skip
BROKEN = [
    "labels are not shifted", "other weights are drawn", "micro-batches in another order",
    "everything is decayed", "dropout is not seeded by step",
]  # fmt: skip


def case(name, ds_config, settings, implementation, **more):
    own = [*settings, f"model.implementation={implementation}"]
    return {"name": name, "ds_config": ds_config, "settings": own, **more}


def train(out, ranks, cases, timeout=180):
    (out / "cases.json").write_text(json.dumps(cases))
    done = run_ranks(ranks, WORKERS / "hf_runs.py", out, out / "cases.json", timeout=timeout)
    assert done.returncode == 0, done.stdout[-5000:]


class Trained:
    """What a case reported and left."""

    def __init__(self, directory):
        reported = json.loads((directory / "reported.json").read_text())
        self.steps = {int(step): values for step, values in reported["steps"].items()}
        self.losses, self.lrs, self.norms, self.scales, self.skipped = zip(*self.steps.values(), strict=True)
        self.validations, self.blocks_run = reported["validations"], reported["blocks_run"]
        self.weights = load_weights(newest(directory / "checkpoints").directory)


def apart(ours, theirs):
    """Largest differences of losses (also in validation), of gradient norms (relative), of final weights."""
    assert ours.weights.keys() == theirs.weights.keys() and len(ours.weights) > 25
    losses = zip((*ours.losses, *ours.validations), (*theirs.losses, *theirs.validations), strict=True)
    return (
        max(abs(a - b) for a, b in losses),
        max(abs(a / b - 1) for a, b in zip(ours.norms, theirs.norms, strict=True)),
        max(float((tensor - theirs.weights[name]).abs().max()) for name, tensor in ours.weights.items()),
    )


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    out = tmp_path_factory.mktemp("hf")
    theirs = [case(broken, "zero3", PUBLISHED_FORM, "transformers", broken=broken) for broken in BROKEN]
    theirs += [
        case("theirs", "zero3", PUBLISHED_FORM, "transformers"),
        case("unpartitioned", "zero1", [*PUBLISHED_FORM, "activation_checkpointing=none"], "transformers"),
        case("resumed", "zero3", [*PUBLISHED_FORM, "run.save_every=2"], "transformers", fails_after=3),
    ]
    train(out, 2, [case("ours", "zero3", PUBLISHED_FORM, "megarecipes"), *theirs])
    return out


@pytest.mark.long
def test_transformers_has_our_loss_curve(on_two_ranks):
    ours, theirs = Trained(on_two_ranks / "ours"), Trained(on_two_ranks / "theirs")
    loss, norm, weights = apart(ours, theirs)
    assert loss < 3e-6 and norm < 1e-6 and weights < 5e-6
    assert ours.lrs == theirs.lrs and len(set(ours.lrs)) == 4
    assert ours.losses[0] - ours.losses[-1] > 0.1, "it has to learn, or equality says little"


@pytest.mark.long
def test_weights_are_the_same_unpartitioned_and_nothing_is_recomputed(on_two_ranks):
    partitioned, other = Trained(on_two_ranks / "theirs"), Trained(on_two_ranks / "unpartitioned")
    loss, norm, weights = apart(partitioned, other)
    assert loss < 3e-6 and norm < 1e-6 and weights < 5e-6
    assert (partitioned.blocks_run, other.blocks_run) == (2, 1), "forward passes of a layer per micro-batch"


@pytest.mark.long
@pytest.mark.parametrize("broken", BROKEN)
def test_what_differs_is_noticed(on_two_ranks, broken):
    loss, _, weights = apart(Trained(on_two_ranks / "ours"), Trained(on_two_ranks / broken))
    assert loss > 1e-5 and weights > 1e-4


@pytest.mark.long
def test_a_resumed_run_equals_the_uninterrupted_one(on_two_ranks):
    whole, resumed = Trained(on_two_ranks / "theirs"), Trained(on_two_ranks / "resumed")
    assert [c.step for c in complete_checkpoints(on_two_ranks / "resumed" / "checkpoints")] == [2, 4]
    assert whole.steps == resumed.steps
    assert all(torch.equal(tensor, resumed.weights[name]) for name, tensor in whole.weights.items())


ACCUMULATED = ["batch.accumulation=2"]
MATRIX = {
    "zero0": ("zero0", ["precision=fp32", *ACCUMULATED]),
    "zero0-bf16": ("zero0", ["precision=bf16", *ACCUMULATED]),
    "zero0-fp16": ("zero0", ["precision=fp16"]),
    # 1 / 12 is rounded in bf16.
    "zero1-bf16": ("zero1", ["precision=bf16", *ACCUMULATED, "batch.global=12"]),
    "zero1-fp16": ("fp16_dynamic", ["precision=fp16", "activation_checkpointing=full"]),
    "zero2-offload": ("zero2_offload", ["precision=fp32", *ACCUMULATED]),
    "zero3-bf16": ("zero3", ["precision=bf16", "activation_checkpointing=full", "dropout.attention=0.1"]),
    "zero3-offload-optimizer": ("zero3_offload_optimizer", ["precision=fp32", "optimizer.clip=0"]),
    "zero3-offload-fp16": (
        "zero3_offload",
        ["precision=fp16", *ACCUMULATED, "activation_checkpointing=full"],
    ),
}


@pytest.fixture(scope="module", params=[1, 2])
def matrix(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(f"hf-{request.param}")
    pairs = [(name, *MATRIX[name], who) for name in MATRIX for who in ("megarecipes", "transformers")]
    train(out, request.param, [case(f"{name}-{who}", *how, who) for name, *how, who in pairs], timeout=500)
    return out


@pytest.mark.long
@pytest.mark.parametrize("name", MATRIX)
def test_every_stage_and_precision(matrix, name):
    """In half precision the two round in other places, and Adam makes a whole step of a tiny gradient."""
    ours, theirs = Trained(matrix / f"{name}-megarecipes"), Trained(matrix / f"{name}-transformers")
    loss, norm, weights = apart(ours, theirs)
    bounds = (1e-3, 5e-3, 1e-2) if name.endswith("16") else (3e-6, 1e-6, 5e-6)
    assert loss < bounds[0] and norm < bounds[1] and weights < bounds[2]
    assert (ours.lrs, ours.scales, ours.skipped) == (theirs.lrs, theirs.scales, theirs.skipped)


# --- the command

COMMAND = [sys.executable, "launch/pretrain.py", "--tiny", "--ds_config", "zero3", "--set", HF]


@pytest.mark.long
def test_a_run_directory_like_every_other(tmp_path):
    out = tmp_path / "run"
    command = [*COMMAND, "--steps", "4", "--set", "run.validate_every=2", "--out", str(out)]
    done = run(command, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("step ", "  0%", "{'", "The "))]
    assert [line.split(":")[0].split(" |")[0] for line in lines] == [
        "step 0", "step 1/4", "step 2/4", "step 2", "step 3/4", "step 4/4", "step 4", "step 4",
    ], done.stdout  # fmt: skip
    for noise in ("Warning", "train_runtime", "deprecated"):
        assert noise not in done.stdout
    for said in ("sample\n", "implementation   transformers ", "(padded to 509)"):
        assert said in done.stdout
    row = json.loads((out / "result.json").read_text())
    assert row["implementation"].startswith("transformers ") and row["status"] == "ok" and row["steps"] == 4
    records = read_metrics(out / "metrics.jsonl")
    assert records.steps and records.validations and (out / "loss.png").exists()
    assert not {p.name for p in out.iterdir()} & {"trainer_state.json", "training_args.bin", "runs"}


@pytest.mark.parametrize("config", ["pipeline", "3d"])
def test_pipelines_of_a_json_are_refused(config):
    recipe = catalog.load(catalog.DEFAULT_RECIPE, [HF], tiny=True)
    with pytest.raises(ConfigError) as error:
        resolve(recipe, config, 4, MACHINE)
    (line,) = [str(problem) for problem in error.value.problems if "default_pipeline" in str(problem)]
    assert f"(default_pipeline of ds_configs/{config}.json) with {HF}" in line and "zero3" in line


def test_recomputation_by_deepspeed_is_refused(tmp_path):
    recipe, path = catalog.load(catalog.DEFAULT_RECIPE, [HF], tiny=True), tmp_path / "cpu.json"
    config = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    config["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": True}
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        resolve(recipe, path, 1, MACHINE)
    (line,) = map(str, error.value.problems)
    assert "activation_checkpointing.cpu_checkpointing=true" in line and "remove the section" in line
    config["activation_checkpointing"] = {"cpu_checkpointing": False}
    path.write_text(json.dumps(config))
    assert resolve(recipe, path, 1, MACHINE).padded_vocab == 509


def test_compiling_is_refused():
    recipe = catalog.load(catalog.DEFAULT_RECIPE, [HF], tiny=True)
    with pytest.raises(ValueError, match="leave --compile out"):
        plan_job(recipe, "zero3", MACHINE, compiled=True, initial_weights=None)


# --- stopping, being killed, what a run leaves

TINY = [*COMMAND[1:], "--set", "run.save_every=4", "--set", "dropout.hidden=0.1"]
KEEP = ["--set", "run.keep_checkpoints=2"]


def losses(directory):
    return {r.step: r.loss for r in read_metrics(directory / "metrics.jsonl").steps}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = run([sys.executable, *TINY, *KEEP, "--out", str(out)])
    assert done.returncode == 0, done.stdout[-3000:]
    return out


def wait_for_steps(out, count, process):
    end = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len(losses(out)) < count:
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.01)


def start(command, out):
    how = {"cwd": ROOT, "env": environment(), "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*command, *TINY, "--out", str(out)], **how)


def resume(out):
    done = run([sys.executable, *TINY, "--out", str(out), "--resume"])
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stdout[-3000:]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_and_resume(uninterrupted, tmp_path, number):
    out = tmp_path / "run"
    process = start([sys.executable], out)
    wait_for_steps(out, 6, process)
    while number == signal.SIGKILL and not complete_checkpoints(out / "checkpoints"):
        wait_for_steps(out, len(losses(out)) + 1, process)  # it is written beside the next steps
    process.send_signal(number)
    text = process.communicate()[0]
    if number != signal.SIGKILL:
        stopped = f"{number.name}: stopped after step {max(losses(out))} of 20, checkpoint saved"
        assert process.returncode == 0 and stopped in text
        assert json.loads((out / "result.json").read_text())["status"] == "interrupted"
    resume(out)
    assert losses(out) == losses(uninterrupted)
    kept = [c.step for c in complete_checkpoints(uninterrupted / "checkpoints")]
    assert kept == [16, 20], "older ones are pruned"


@pytest.mark.long
def test_killed_while_saving(tmp_path):
    out = tmp_path / "run"
    killed = run([sys.executable, str(WORKERS / "killed_while_saving.py"), *TINY[1:], "--out", str(out)])
    assert killed.returncode == -signal.SIGKILL, killed.stdout[-3000:]
    assert [c.step for c in complete_checkpoints(out / "checkpoints")] == [4]
    resume(out)
    assert newest(out / "checkpoints").step == 20


@pytest.mark.long
def test_a_stop_file_stops_both_ranks(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    process = start(deepspeed(2), out)
    wait_for_steps(out, 2, process)
    (out / "STOP").touch()
    text = process.communicate()[0]
    assert process.returncode == 0 and "STOP file: stopped after step" in text, text[-3000:]
    assert newest(out / "checkpoints").step == max(losses(out))


@pytest.mark.long
def test_a_finished_run_is_reported_again(uninterrupted):
    before = losses(uninterrupted)
    done = run([sys.executable, *TINY, *KEEP, "--out", str(uninterrupted), "--resume"])
    assert done.returncode == 0 and losses(uninterrupted) == before, done.stdout[-3000:]
    assert json.loads((uninterrupted / "result.json").read_text())["status"] == "ok"


@pytest.mark.long
def test_a_lost_loss_ends_with_3(tmp_path):
    out = tmp_path / "run"
    done = run([*COMMAND, "--set", "optimizer.lr=1e30", "--out", str(out)])
    assert done.returncode == 3 and done.stdout.count("the loss is nan in bf16") == 1, done.stdout[-3000:]
    assert json.loads((out / "result.json").read_text())["status"] == "diverged"


@pytest.mark.long
def test_export_and_start_from_it(uninterrupted, tmp_path):
    exported, out = tmp_path / "exported", tmp_path / "run"
    done = run([sys.executable, "launch/export_hf.py", str(uninterrupted), "--out", str(exported)])
    assert done.returncode == 0 and "differ by at most" in done.stdout, done.stdout[-3000:]
    flags = ("--steps", "1", "--set", "precision=fp32", "--init_from", str(exported), "--out", str(out))
    done = run([*COMMAND, *flags])
    assert done.returncode == 0, done.stdout[-3000:]
    first, last = (read_metrics(d / "metrics.jsonl").validations for d in (out, uninterrupted))
    assert math.isclose(first[0].loss, last[-1].loss, abs_tol=1e-3), "validated in another precision"
