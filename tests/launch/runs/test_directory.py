"""A run directory takes one run, refuses everything else and survives being killed."""

import dataclasses
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import durable_files
from launch import pretrain
from launch.runs.directory import (
    RunDirectory,
    RunDirectoryError,
    default_path,
    read_metrics,
    write_atomically,
)
from launch.training.job import Job
from recipes import catalog
from recipes.schema import Recipe


def recipe(**changes) -> Recipe:
    values = {
        "title": "small",
        "model": {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 300},
        "sequence_length": 16,
        "batch": {"micro": 2, "global": 4},
        "steps": 20,
        "optimizer": {"lr": 1e-3},
    }
    return Recipe(**{**values, **changes})


def plan(dp: int = 1, ds: dict | None = None, **changes):
    layout = SimpleNamespace(tp=1, pp=1, dp=dp, micro=2, accumulation=2 // dp, global_batch=4)
    facts = {
        "recipe": recipe(),
        "layout": layout,
        "ds": ds or {"zero_optimization": {"stage": 1}, "optimizer": {"params": {"betas": (0.9, 0.95)}}},
        "zero_stage": 1,
        "offload": "none",
        "precision": "fp32",
        "padded_vocab": 384,
        "notices": (),
        "ds_name": "zero1",
    }
    return SimpleNamespace(**{**facts, **changes})


def create(path, plan_, resume: bool = False) -> RunDirectory:
    run = RunDirectory.create(
        path, plan_, name="default/small", command=["pretrain.py", "--steps", "3"], resume=resume
    )
    run.close()
    return run


def add_steps(run: RunDirectory, steps: int = 3) -> None:
    lines = [json.dumps({"kind": "step", "step": step, "loss": 1.0}) for step in range(1, steps + 1)]
    run.metrics_jsonl.write_text("\n".join(lines) + "\n")


def refusal(path, plan_, resume: bool = False) -> str:
    before = snapshot(path)
    with pytest.raises(RunDirectoryError) as caught:
        create(path, plan_, resume)
    assert snapshot(path) == before, "a refused launch has changed the directory"
    return str(caught.value)


def snapshot(path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


def test_the_directory_explains_the_run(tmp_path):
    run = create(tmp_path / "deep" / "run", plan(notices=("bf16 -> fp32: no bf16 here",)))
    assert catalog.load_resolved(run.recipe_yaml) == recipe()
    assert json.loads(run.ds_config_json.read_text())["zero_optimization"] == {"stage": 1}
    (launch,) = run.launches()
    assert launch["command"] == ["pretrain.py", "--steps", "3"]
    assert launch["plan"]["layout"]["dp"] == 1 and launch["plan"]["notices"] == ["bf16 -> fp32: no bf16 here"]
    assert launch["versions"]["torch"] and launch["cores"] >= 1 and launch["host"]
    assert run.checkpoints.is_dir() and not run.resumed


def test_the_default_path_names_recipe_and_ds_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert create(None, plan()).path == Path("runs/default-small-zero1")
    assert default_path("a table.yaml/72x3072-h32 (tiny)", "3d") == Path(
        "runs/a-table.yaml-72x3072-h32-tiny-3d"
    )


def test_an_empty_directory_and_a_run_that_never_made_a_step_are_taken(tmp_path):
    assert not create(tmp_path, plan()).resumed
    assert not create(tmp_path, plan()).resumed
    assert not create(tmp_path, plan(), resume=True).resumed, (
        "--resume with nothing to resume starts from the beginning"
    )


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_of_another_recipe_is_refused(tmp_path, resume):
    add_steps(create(tmp_path, plan()))
    message = refusal(tmp_path, plan(recipe=recipe(seed=7)), resume)
    assert "another recipe" in message and "--out" in message
    assert "seed: 1234 -> 7" in message


def test_steps_are_not_overwritten_without_resume(tmp_path):
    add_steps(create(tmp_path, plan()))
    message = refusal(tmp_path, plan())
    assert "--resume" in message and "--out" in message


def test_a_launch_forgets_the_errors_of_the_last_and_a_refused_one_does_not(tmp_path):
    add_steps(create(tmp_path, plan()))
    (tmp_path / "error-rank-3.txt").write_text("torch.OutOfMemoryError: CUDA out of memory.")
    job = Job(plan(), "default/small", tmp_path)
    with pytest.raises(SystemExit):
        pretrain.open_run_directory(job)
    assert (tmp_path / "error-rank-3.txt").exists()
    pretrain.open_run_directory(dataclasses.replace(job, resume=True)).close()
    assert not (tmp_path / "error-rank-3.txt").exists()


def test_checkpoints_alone_count_as_steps(tmp_path):
    run = create(tmp_path, plan())
    (run.checkpoints / "step_10").mkdir()
    assert "--resume" in refusal(tmp_path, plan())


def test_resume_adds_a_launch(tmp_path):
    add_steps(create(tmp_path, plan()))
    run = create(tmp_path, plan(), resume=True)
    assert run.resumed and run.notices == ()
    assert len(run.launches()) == 2
    assert len(read_metrics(run.metrics_jsonl)) == 3


def test_resume_may_change_what_is_only_printed(tmp_path):
    add_steps(create(tmp_path, plan(ds={"zero_optimization": {"stage": 1}, "steps_per_print": 10})))
    changed = {"zero_optimization": {"stage": 1}, "steps_per_print": 500, "flops_profiler": {"enabled": True}}
    run = create(tmp_path, plan(ds=changed, recipe=recipe(run={"save_every": 5})), resume=True)
    assert "resumed with steps_per_print: 10 -> 500" in run.notices
    assert json.loads(run.ds_config_json.read_text()) == changed
    assert catalog.load_resolved(run.recipe_yaml).run.save_every == 5


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"dp": 2}, "layout.dp: 1 -> 2"),
        ({"zero_stage": 3}, "zero_stage: 1 -> 3"),
        ({"precision": "bf16"}, "precision: fp32 -> bf16"),
        ({"ds": {"zero_optimization": {"stage": 1}}}, "optimizer.params.betas: [0.9, 0.95] -> absent"),
    ],
)
def test_resume_in_another_layout_or_configuration_is_refused(tmp_path, other, line):
    add_steps(create(tmp_path, plan()))
    message = refusal(tmp_path, plan(**other), resume=True)
    assert line in message and "zero1.json" in message and "--out" in message


def test_a_directory_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    message = refusal(tmp_path, plan(), resume=True)
    assert "thesis.tex" in message and "--out" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_paths_that_cannot_be_a_directory_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunDirectoryError, match="--out"):
            create(path, plan())


def test_a_broken_recipe_is_named(tmp_path):
    run = create(tmp_path, plan())
    run.recipe_yaml.write_text("model: [")
    assert "recipe.yaml" in refusal(tmp_path, plan())


def test_a_run_that_starts_over_forgets_its_first_validation(tmp_path):
    run = create(tmp_path, plan())
    run.metrics_jsonl.write_text('{"kind": "validation", "step": 0, "loss": 6.0}\n')
    run.truncate_metrics(1)
    assert len(read_metrics(run.metrics_jsonl)) == 1
    run.truncate_metrics(0)
    assert read_metrics(run.metrics_jsonl) == []


def test_metrics_are_cut_at_the_resumed_step(tmp_path):
    run = create(tmp_path, plan())
    add_steps(run, 5)
    with open(run.metrics_jsonl, "a") as file:
        file.write('{"kind": "step", "step": 6, "lo')  # what a killed process leaves
    assert [record["step"] for record in read_metrics(run.metrics_jsonl)] == [1, 2, 3, 4, 5]
    run.truncate_metrics(4)
    assert run.metrics_jsonl.read_text().count("\n") == 4
    assert run.metrics_jsonl.read_text().endswith("}\n")
    run.truncate_metrics(0)
    assert run.metrics_jsonl.read_text() == ""


def test_a_line_broken_in_the_middle_is_not_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="metrics.jsonl:2"):
        read_metrics(path)


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
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    ) as holder:
        try:
            assert holder.stdout.readline() == b"taken\n"
            assert "another process" in refusal(tmp_path, plan())
        finally:
            holder.send_signal(signal.SIGKILL)
    create(tmp_path, plan())


def test_a_finished_run_without_checkpoints_is_not_trained_over(tmp_path):
    path = tmp_path / "run"
    run = create(path, plan())
    run.metrics_jsonl.write_text('{"kind": "step", "step": 20}\n')
    for status, refused in (("interrupted", False), ("ok", True)):
        run.result_json.write_text(json.dumps({"status": status}))
        if refused:
            with pytest.raises(RunDirectoryError, match="nothing to go on from"):
                create(path, plan(), resume=True)
        else:
            create(path, plan(), resume=True)
    (run.checkpoints / "step-000020").mkdir(parents=True)
    create(path, plan(), resume=True)
    assert run.metrics_jsonl.read_text()
