"""A run directory takes one run, refuses everything else and survives being killed."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import recorded
from launching import ROOT

from data import durable_files
from data.durable_files import write_atomically
from ds_configs.findings import Notice
from ds_configs.plan import Plan
from launch.console.arguments import run_directory
from launch.machine import description
from launch.records import admission
from launch.records.admission import admit
from launch.records.directory import RunDirectory
from launch.records.facts import RunFacts, SaveOutcome
from launch.records.metrics import read_metrics, to_line
from launch.training.job import Job
from launch.training.start import open_run_directory
from recipes import catalog
from recipes.layout import Layout
from recipes.schema import Recipe

MACHINE = description.describe()


def plan(dp: int = 1, **changes) -> Plan:
    layout = Layout(tp=1, pp=1, dp=dp, micro=2, accumulation=2 // dp, global_batch=4)
    ds = {"zero_optimization": {"stage": 1}, "optimizer": {"params": {"betas": (0.9, 0.95)}}}
    return recorded.plan(**{"recipe_": recipe(), "layout": layout, "ds": ds, **changes})


def recipe(**changes) -> Recipe:
    return recorded.recipe(**{"batch": {"micro": 2, "global": 4}, **changes})


def create(path, plan_: Plan, resume: bool = False, newest: int | None = 1, damaged=()) -> RunDirectory:
    run = admit(
        path,
        recorded.facts(plan_, name="default/small", machine=MACHINE),
        ["pretrain.py", "--steps", "3"],
        resume=resume,
        newest=newest if resume else None,
        damaged=damaged,
    )
    run.close()
    return run


def add_steps(run: RunDirectory, steps: int = 3) -> None:
    recorded.run_steps(run.path, plan(), steps)


def refusal(path, plan_, resume: bool = False, **checkpoints) -> str:
    before = snapshot(path)
    with pytest.raises(ValueError) as caught:
        create(path, plan_, resume, **checkpoints)
    assert snapshot(path) == before, "a refused launch has changed the directory"
    return str(caught.value)


def snapshot(path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


def test_the_directory_explains_the_run(tmp_path):
    said = Notice("precision", "bf16 -> fp32: no bf16 here")
    run = create(tmp_path / "deep" / "run", plan(notices=(said,)))
    assert catalog.load_resolved(run.recipe_yaml) == recipe()
    assert json.loads(run.ds_config_json.read_text())["zero_optimization"] == {"stage": 1}
    (launch,) = run.launches()
    assert launch.command == ("pretrain.py", "--steps", "3") and not launch.tiny
    notice = {"key": "precision", "text": "bf16 -> fp32: no bf16 here", "differs": True}
    assert launch.plan["layout"]["dp"] == 1 and launch.plan["notices"] == [notice]
    (entry,) = json.loads(run.environment_json.read_text())["launches"]
    assert entry["versions"]["torch"] and entry["cores"] >= 1 and entry["host"] and entry["tiny"] is False
    assert run.plan().layout == plan().layout and run.plan().recipe == recipe()
    assert run.checkpoints.is_dir() and not run.resumed


def test_the_default_path_names_recipe_and_ds_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert create(None, plan()).path == Path("runs/default-small-zero1")
    named = run_directory("a table.yaml/72x3072-h32 (tiny)", "3d")
    assert named == Path("runs/a-table.yaml-72x3072-h32-tiny-3d")


def test_an_empty_directory_and_a_run_that_never_made_a_step_are_taken(tmp_path):
    for resume in (False, False, True):
        assert not create(tmp_path, plan(), resume).resumed, "--resume with nothing to resume starts anew"


def test_neither_steps_nor_checkpoints_are_overwritten_without_resume(tmp_path):
    add_steps(create(tmp_path / "steps", plan()))
    (create(tmp_path / "saved", plan()).checkpoints / "step_10").mkdir()
    for name in ("steps", "saved"):
        message = refusal(tmp_path / name, plan())
        assert "--resume" in message and "--out" in message


def test_a_launch_forgets_the_errors_of_the_last_and_a_refused_one_does_not(tmp_path):
    add_steps(create(tmp_path, plan()))
    (tmp_path / "error-rank-3.txt").write_text("torch.OutOfMemoryError: CUDA out of memory.")
    job = Job(RunFacts(plan(), "default/small", original=recipe()), tmp_path)
    with pytest.raises(ValueError):
        open_run_directory(job)
    assert (tmp_path / "error-rank-3.txt").exists()
    open_run_directory(dataclasses.replace(job, resume=True)).close()
    assert not (tmp_path / "error-rank-3.txt").exists()


def test_resume_adds_a_launch(tmp_path):
    add_steps(create(tmp_path, plan()))
    run = create(tmp_path, plan(), resume=True)
    assert run.resumed and run.notices == ()
    assert len(run.launches()) == 2
    assert len(read_metrics(run.metrics_jsonl).steps) == 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"zero_stage": 3}, "zero_stage 1, and now it is 3"), ({"dp": 2}, "processes 1, and now it is 2")],
)
def test_a_fine_tuning_is_resumed_only_by_the_engine_that_wrote_it(tmp_path, changed, said):
    with pytest.raises(ValueError, match=f"was trained with {said}: .* resume with 1, or"):
        admission._refuse_another_engine(tmp_path, plan(), plan(**changed))
    admission._refuse_another_engine(tmp_path, plan(), plan(padded_vocab=300))


def test_resume_may_change_how_the_work_is_done_and_says_so(tmp_path):
    add_steps(create(tmp_path, plan(ds={"zero_optimization": {"stage": 1}, "steps_per_print": 10})))
    ds = {"zero_optimization": {"stage": 3}, "steps_per_print": 500}
    changes = dict(
        activation_checkpointing="full", run={"save_every": 5}, steps=30, precision="bf16",
        schedule={"decay_steps": 20}, title="another",
        model={**recipe().model.model_dump(), "implementation": "transformers", "vocab_divisible_by": 1},
    )  # fmt: skip
    facts = dict(zero_stage=3, precision="bf16", offload="optimizer", padded_vocab=300, ds_name="zero3")
    other = plan(dp=2, ds=ds, recipe_=recipe(**changes), **facts)
    run = create(tmp_path, other, resume=True)
    *facts, config = run.notices
    assert config == (
        "resumed with another DeepSpeed configuration: zero_optimization.stage: 1 -> 3; "
        "steps_per_print: 10 -> 500"
    )
    assert sorted(facts) == [
        f"resumed with {change}" for change in (
            "activation_checkpointing: none -> full", "ds_name: zero1 -> zero3",
            "layout.accumulation: 2 -> 1", "layout.dp: 1 -> 2",
            "model.implementation: megarecipes -> transformers", "model.vocab_divisible_by: 128 -> 1",
            "offload: none -> optimizer", "padded_vocab: 384 -> 300", "precision: fp32 -> bf16",
            "run.save_every: 0 -> 5", "steps: 20 -> 30", "zero_stage: 1 -> 3",
        )
    ]  # fmt: skip
    assert json.loads(run.ds_config_json.read_text()) == ds
    assert [launch.plan["layout"]["dp"] for launch in run.launches()] == [1, 2]
    assert run.newest_launch().plan["layout"]["dp"] == 2
    assert catalog.load_resolved(run.recipe_yaml).run.save_every == 5


def test_resume_says_what_is_not_to_the_digit(tmp_path):
    dropout = recipe(dropout={"attention": 0.1})
    add_steps(create(tmp_path, plan(recipe_=dropout)))
    (same,) = create(tmp_path, plan(recipe_=dropout, precision="fp16"), resume=True).notices[1:]
    assert same == "fp16's loss scaler starts afresh, with its initial scale"
    notices = create(tmp_path, plan(dp=2, recipe_=dropout, precision="fp16"), resume=True).notices
    assert "statistically, not to the digit" in notices[-1] and "scaler" not in "".join(notices)
    hidden = recipe(dropout={"hidden": 0.1})
    path = tmp_path / "hidden"
    add_steps(create(path, plan(recipe_=hidden)))
    assert "statistically" not in "".join(create(path, plan(dp=2, recipe_=hidden), resume=True).notices)


def test_everything_that_cannot_change_is_named_at_once(tmp_path):
    add_steps(create(tmp_path, plan()))
    changes = dict(
        sequence_length=32, optimizer={"lr": 2e-3}, steps=30, dropout={"hidden": 0.1}, init_std=0.1,
        batch={"global": 8}, data={"validation_every": 5}, precision="bf16",
        model={**recipe().model.model_dump(), "layers": 3, "vocab_size": 301},
    )  # fmt: skip
    message = refusal(tmp_path, plan(recipe_=recipe(**changes)))
    assert message == refusal(tmp_path, plan(recipe_=recipe(**changes)), resume=True)
    assert message.splitlines()[1:] == [
        "  model.layers: 2 -> 3", "  model.vocab_size: 300 -> 301", "  sequence_length: 16 -> 32",
        "  batch.global: 4 -> 8", "  optimizer.lr: 0.001 -> 0.002", "  schedule.decay_steps: 20 -> 30",
        "  dropout.hidden: 0.0 -> 0.1", "  init_std: 0.02 -> 0.1", "  data.validation_every: 20 -> 5",
    ]  # fmt: skip
    assert "another recipe" in message and "--out" in message and "--steps N" in message


def test_a_run_is_never_cut_back(tmp_path):
    add_steps(create(tmp_path, plan()), 6)
    schedule = {"decay_steps": 20}
    message = refusal(tmp_path, plan(recipe_=recipe(steps=3, schedule=schedule)), True, newest=6)
    assert "--steps 3" in message and "6 steps done" in message and "--steps 6" in message
    for steps in (6, 7):
        own = plan(recipe_=recipe(steps=steps, schedule=schedule))
        assert create(tmp_path, own, True, newest=6).resumed


def test_steps_whose_checkpoints_are_all_damaged_are_not_thrown_away(tmp_path):
    run = create(tmp_path, plan())
    add_steps(run)
    damaged = tuple((run.checkpoints / f"step-00000{n}", f"file {n} is missing") for n in (2, 3))
    message = refusal(tmp_path, plan(), True, newest=None, damaged=damaged)
    assert all(f"{path}: {why}" in message for path, why in damaged) and "--out" in message
    assert create(tmp_path, plan(), True, newest=2, damaged=damaged).resumed


@pytest.mark.parametrize(
    ("saves", "status", "save_last", "said"),
    [
        ([None], None, True, "put them back"),
        ([None], "ok", False, "put them back"),
        ([], "ok", True, "put them back"),  # by a version that recorded no saves
        ([], "ok", False, "run.save_last=false"),
        (["no space left"], "not saved", True, None),
        ([], "saving", True, None),
        ([], None, True, None),
    ],
)
def test_lost_checkpoints_are_told_from_a_first_save_that_never_was(tmp_path, saves, status, save_last, said):
    own = plan(recipe_=recipe(run={"save_last": save_last}))
    run = create(tmp_path, own)
    add_steps(run, 6)
    with open(run.metrics_jsonl, "a") as file:
        file.writelines(to_line(SaveOutcome(6, 1, 0.1, 0.1, True, problem)) for problem in saves)
    if status:
        run.result_json.write_text(json.dumps({"status": status, "steps": 6}))
    recorded = run.metrics_jsonl.read_text()
    if said:
        assert said in refusal(tmp_path, own, True, newest=None)
        return
    again = create(tmp_path, own, True, newest=None)
    (notice,) = again.notices
    assert not again.resumed and "after step 6" in notice and "starts again at step 0" in notice
    assert (tmp_path / "metrics-before-1.jsonl").read_text() == recorded
    assert not again.metrics_jsonl.exists()


def test_a_directory_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    message = refusal(tmp_path, plan(), resume=True)
    assert "thesis.tex" in message and "--out" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_paths_that_cannot_be_a_directory_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="--out"):
            create(path, plan())


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
def test_what_is_of_another_kind_than_a_run_makes_is_named_at_once(tmp_path, make):
    run = create(tmp_path, plan())
    add_steps(run)
    for path in (run.loss_png, run.result_json, run.stop, run.lock_file, run.metrics_jsonl):
        path.unlink(missing_ok=True)
        make(path)
    said = refusal(tmp_path, plan(), resume=True)
    for path in (run.loss_png, run.result_json, run.stop, run.lock_file, run.metrics_jsonl):
        assert str(path) in said
    assert "a run keeps a file under that name; move it away, or" in said


def test_files_in_the_place_of_a_runs_directories_are_refused(tmp_path):
    run = create(tmp_path, plan())
    add_steps(run)
    run.checkpoints.rmdir()
    shutil.rmtree(run.tensorboard)
    for path in (run.tensorboard, run.checkpoints, run.tokenizer):
        path.touch()
    said = refusal(tmp_path, plan(), resume=True)
    assert f"{run.tensorboard}, {run.checkpoints}, {run.tokenizer}: a run keeps a directory under" in said


def test_a_broken_plan_is_named(tmp_path):
    run = create(tmp_path, plan())
    add_steps(run)
    run.plan_json.write_text('{"recipe": [')
    message = refusal(tmp_path, plan(), resume=True)
    assert "plan.json" in message and "--out" in message


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomically(path, "old")

    def crash(*_):
        raise OSError("no space left")

    monkeypatch.setattr(durable_files.os, "replace", crash)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_written_files_follow_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "text")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_one_process_at_a_time_even_after_a_kill(tmp_path):
    code = (
        "import sys, time, pathlib; from data.durable_files import Lock\n"
        "lock = Lock.take(pathlib.Path(sys.argv[1])); print('taken', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        try:
            assert holder.stdout.readline() == b"taken\n"
            said = refusal(tmp_path, plan())
            assert f"process {holder.pid} on {socket.gethostname()}" in said and "STOP" in said
        finally:
            holder.send_signal(signal.SIGKILL)
    create(tmp_path, plan())
