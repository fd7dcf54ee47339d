"""Training on the second device: the CPU's losses, out of memory, counts; commands and layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from compared import check_all_layouts
from launching import ROOT, WORKERS, environment, run, run_ranks
from rank_server import free_port
from safetensors.torch import load_file
from second_device.running import check_equal, needed, on_board, train_layouts
from tasked import save_bert, sentences, write_lines

from data.durable_files import cache_directory
from launch.experiments.parity.layout_cases import LayoutCase
from launch.experiments.proving.task import tensors_of
from launch.planning import resolved_plans
from launch.planning.prediction import rank_memory, workload
from launch.records.metrics import read_metrics
from launch.records.result import read_result
from modeling import cost
from recipes import catalog

pytestmark = needed
PRETRAIN = ROOT / "launch/pretrain.py"
DROPPED = ["dropout.hidden=0.1", "dropout.attention=0.1", "run.save_last=true"]
FP32, HIDDEN = [*DROPPED, "precision=fp32"], [DROPPED[0], "precision=fp32"]
GPT2, BERT = catalog.DEFAULT_RECIPE, "bert/sotu"
STAGES = [LayoutCase(f"zero{stage}", 1, 1, 1, f"zero{stage}") for stage in range(4)]
TWO_RANKS = [
    LayoutCase("tp2 zero3", 2, 1, 1, "zero3"),
    LayoutCase("dp2 zero2", 1, 1, 2, "zero2"),
    LayoutCase("pp2", 1, 2, 1, "pipeline", accumulation=4),
]
JSONS = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))


@pytest.mark.ci
def test_losses_of_every_stage_and_of_two_ranks_are_the_cpus(tmp_path):
    check_equal(tmp_path, GPT2, FP32, [*STAGES, *TWO_RANKS])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("settings", "cases"),
    [
        (["data.attend=document", "run.check_every=1"], [STAGES[1], TWO_RANKS[2]]),
        (["optimizer.name=muon", "run.check_every=1"], [STAGES[1], STAGES[3]]),
    ],
    ids=["borders", "muon"],
)
def test_newer_features_train_there_as_on_the_cpu(tmp_path, settings, cases):
    check_equal(tmp_path, GPT2, [*FP32, *settings], cases)


@pytest.mark.ci
def test_a_fine_tuning_has_the_cpus_losses(tmp_path):
    files = []
    for split, seed in (("train", 0), ("dev", 1)):
        files += [f"--{split}", write_lines(tmp_path / f"{split}.jsonl", sentences(40, seed))]
    flags = ["--task", "sst2", "--init", save_bert(tmp_path / "bert"), "--sequence_length", 32, *files]
    flags += ["--ds_config", "zero1", "--batch", 8, "--lr", 1e-3, "--steps", 5]
    for setting in ("dropout.hidden=0", "dropout.attention=0", "precision=fp32"):
        flags += ["--set", setting]
    there, here = [], []
    for found, env in ((there, on_board()), (here, None)):
        out = tmp_path / str(env is None)
        done = run_ranks(1, ROOT / "launch/finetune.py", *flags, "--out", out, env=env)
        assert done.returncode == 0, done.stdout[-3000:]
        read = read_metrics(out / "metrics.jsonl")
        found += [each.loss for each in (*read.steps, *read.validations)]
    assert there == pytest.approx(here, abs=2e-6) and len(there) == 7


@pytest.mark.ci
def test_muon_takes_no_more_memory_than_adamw_nor_than_planned(tmp_path, monkeypatch):
    """In rounds that are small beside the model, as 2^26 elements are beside a billion."""
    muon = tmp_path / "muon.json"
    given = ["model.layers=9", "sequence_length=64", "batch.global=2", "precision=fp32"]
    settings = [*given, "schedule.warmup_steps=1", "run.prompt=null", "run.save_last=false"]
    flags = ["--steps", 3, "--ds_config", "zero1", "--compile", "off"]
    for setting in settings:
        flags += ["--set", setting]
    for script, recipe in (([PRETRAIN], GPT2), ([WORKERS / "muon_rounds.py", muon], f"{GPT2}-muon")):
        out = tmp_path / recipe
        done = run_ranks(2, *script, *flags, "--recipe", recipe, "--out", out, env=on_board(), timeout=400)
        assert done.returncode == 0, done.stdout[-3000:]
    adamw = read_result(tmp_path / GPT2 / "result.json").memory.peak_bytes
    found = json.loads(muon.read_text())
    print(adamw, found)
    assert found["peak"] < adamw
    monkeypatch.setattr(cost, "MUON_AT_ONCE", 2**20)
    plan = resolved_plans.resolve_on_machine(catalog.load(f"{GPT2}-muon", settings), "zero1", 2)
    planned = rank_memory.muon_bytes(workload.of_plan(plan), 0)
    assert planned / 2 < found["taken"] < planned


def test_a_buffer_left_on_the_host_ends_zero3_with_dropout(tmp_path):
    """zero.Init moves parameters alone."""
    flags = ["--tiny", "--steps", 1, "--ds_config", "zero3", "--set", DROPPED[0], "--out", tmp_path / "run"]
    done = run_ranks(1, WORKERS / "buffers_left.py", *flags, env=on_board())
    assert done.returncode != 0 and "Expected all tensors to be on the same device" in done.stdout


def test_out_of_memory_is_a_result(tmp_path):
    flags = ["--tiny", "--steps", 2, "--ds_config", "zero1", "--out", tmp_path / "run"]
    done = run_ranks(1, PRETRAIN, *flags, env=on_board(BOARD_MEMORY_MB=8))
    assert done.returncode != 0 and "board: out of memory. Tried to allocate" in done.stdout
    row = read_result(tmp_path / "run" / "result.json")
    assert row.status == "OOM" and "rank 0: OutOfMemoryError: board" in row.reason


# The second tier


@pytest.mark.long
@pytest.mark.parametrize("recipe", [GPT2, BERT])
@pytest.mark.parametrize("half", [False, True])
def test_every_json_trains_with_dropout(tmp_path, recipe, half):
    """bf16 sums in another order than on a CPU; BERT's attention, with none here, draws its dropout so."""
    names = [name for name in JSONS if ("16" in name) == half and name != "zero_infinity"]  # libaio
    cases = [
        LayoutCase(name, 1, 1, 1, name, checkpointing="full" if "checkpointing" in name else "none")
        for name in names
    ]
    if half:
        for name, found in train_layouts(recipe, DROPPED, cases, tmp_path, 4, on_board()).items():
            assert found.losses[4] < found.losses[1], name
    else:
        check_equal(tmp_path, recipe, FP32 if recipe == GPT2 else HIDDEN, cases, steps=4)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        ["model.attention=[dense,fixed]", "model.attention_window=24", "model.attention_columns=4"],
        ["batch.rampup={start: 4, increment: 4, samples: 4}"],
        ["parallel.torch_ddp=true"],
        ["model.shared_layers=true"],
    ],
    ids=lambda settings: settings[0].partition("=")[0],
)
def test_what_some_recipes_have_trains_as_on_the_cpu(tmp_path, settings):
    ddp = LayoutCase("tp2 dp2 zero0", 2, 1, 2, "zero0", checkpointing="full")
    cases = [ddp] if "torch_ddp" in settings[0] else [*TWO_RANKS, ddp]
    check_equal(tmp_path, GPT2, [*FP32, *settings], cases, steps=4)


@pytest.mark.long
def test_activations_that_leave_the_device_meanwhile_come_back_whole(tmp_path):
    """DeepSpeed empties the inputs of recomputed chunks, one tensor rank's whole, while they are copied."""
    recomputed = {"zero3": "none", "zero3_cpu_checkpointing": "full"}
    cases = [LayoutCase(name, 1, 1, 1, name, checkpointing=what) for name, what in recomputed.items()]
    kept, copied = train_layouts(GPT2, HIDDEN, cases, tmp_path, 4, on_board()).values()
    assert len(kept.losses) == 4
    assert copied.losses == kept.losses and copied.norms == kept.norms
    first, second = (load_file(tensors_of(tmp_path / case.folder, 1)) for case in cases)
    assert first.keys() == second.keys() and any(name.startswith("gradient/") for name in first)
    for name, tensor in first.items():
        assert second[name].equal(tensor), name


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", [GPT2, BERT])
def test_all_layouts_agree_there(tmp_path, monkeypatch, recipe):
    for name, value in on_board().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("launching.environment", lambda extra=None: {**os.environ, **(extra or {})})
    check_all_layouts(tmp_path / "out", "--recipe", recipe)


def published() -> list[str]:
    return [f"{t.name}/{next(iter(t.rows))}" for t in catalog.tables() if t.published]


@pytest.mark.long
@pytest.mark.parametrize("name", published())
def test_a_row_of_every_published_table_trains(tmp_path, name):
    recipe = catalog.load(name, tiny=True)
    flags = ["--recipe", name, "--tiny", "--steps", 2, "--out", tmp_path / "run"]
    done = run_ranks(resolved_plans.processes(recipe), PRETRAIN, *flags, env=on_board(), timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert read_result(tmp_path / "run" / "result.json").status == "ok"


COMMANDS = (
    "test_finetune.py",
    "test_generate.py",
    "test_export_hf.py",
    "training/test_run_weights.py",
    "checkpoints/test_any_layout.py",
    "checkpoints/test_resume.py",
    "checkpoints/test_kills.py",
)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", COMMANDS)
def test_tests_of_commands_pass_there(file):
    """What they launch has the second device: scores, fine-tuning, text, weights, kills and resumes."""
    env = {"LAUNCHED_ON": "board", "PYTHONPATH": on_board()["PYTHONPATH"]}
    done = run([sys.executable, "-m", "pytest", "-q", f"tests/launch/{file}"], env=env, timeout=1700)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.long
def test_two_machines_train_one_run(tmp_path):
    """Two launchers, each of which numbers its devices from 0."""
    flags = ["--tiny", "--steps", "3", "--ds_config", "zero3", "--set", "precision=fp32"]
    end = [
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        f"127.0.0.1:{free_port()}",
        "--local_addr",
        "127.0.0.1",
    ]
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", *end]
    command = [sys.executable, *launcher, str(PRETRAIN), *flags, "--out", str(tmp_path / "two")]
    given = {"BOARD_DEVICES": 1, "MEGARECIPES_CACHE": cache_directory()}
    machines = [
        subprocess.Popen(command, env=environment(on_board(HOME=tmp_path / home, **given)), cwd=ROOT)
        for home in ("first", "second")
    ]
    assert [machine.wait(200) for machine in machines] == [0, 0]
    alone = run_ranks(1, PRETRAIN, *flags, "--out", tmp_path / "one")
    assert alone.returncode == 0
    losses = [
        [s.loss for s in read_metrics(tmp_path / run / "metrics.jsonl").steps] for run in ("two", "one")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


DROPOUT = "dropout.hidden=0.1"
FOUR = ("batch.micro=1", "batch.global=4")


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "name", "settings", "most_waits"),
    [
        (GPT2, "zero0", (), 1),
        (GPT2, "zero1", (), 1),
        pytest.param(GPT2, "zero1", (DROPOUT,), 1, marks=pytest.mark.ci),
        (BERT, "zero1", (), 1),
        (BERT, "zero1", (DROPOUT,), 1),
        (GPT2, "zero2", (), 1),
        (GPT2, "zero3", (), 3),
        (GPT2, "zero2_offload", (), 3),
        (GPT2, "zero2_offload", FOUR, 3),
        (GPT2, "zero2_offload", (*FOUR, "precision=fp16"), 3),
        (GPT2, "zero3_offload", (), 9),
        (GPT2, "zero3_offload", FOUR, 12),
    ],
)
def test_what_a_step_starts_and_waits_for(tmp_path, recipe, name, settings, most_waits):
    """One step is what four have more than three; printed (pytest -s)."""
    counted = []
    for steps in (3, 4):
        file = tmp_path / f"{steps}.json"
        flags = ["--recipe", recipe, "--tiny", "--steps", steps, "--ds_config", name]
        for setting in ("run.prompt=null", "run.check_every=0", *settings):
            flags += ["--set", setting]
        done = run_ranks(1, PRETRAIN, *flags, "--out", tmp_path / str(steps), env=on_board(BOARD_COUNTS=file))
        assert done.returncode == 0, done.stdout[-3000:]
        counted.append(json.loads(file.with_suffix(".0.json").read_text()))
    step = {
        kind: {what: n - counted[0][kind].get(what, 0) for what, n in counted[1][kind].items()}
        for kind in counted[1]
    }
    sums = {kind: sum(each.values()) for kind, each in step.items()}
    print(
        recipe,
        name,
        settings,
        sums,
        {kind: {k: n for k, n in each.items() if n} for kind, each in step.items()},
    )
    assert 200 < sums["launches"] < 10_000 and sums["waits"] <= most_waits, step["waits"]
