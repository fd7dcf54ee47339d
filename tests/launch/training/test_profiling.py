"""A profile: what it writes, and that nobody else pays for it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import run_ranks
from recorded import outcome, plan, recipe, recorder
from torch import nn

from launch.records.facts import StepRecord
from launch.records.metrics import read_metrics
from launch.records.result import steady_seconds
from launch.training import profiling
from launch.training.profiling import OWN, STEP
from recipes import catalog
from recipes.problems import RecipeError


class MLP(nn.Linear):
    pass


def run_of(engine, steps, directory):
    """Return a run with this much of it, and what it says."""
    said = []
    run = SimpleNamespace(
        engine=engine, before_step=[], grid=SimpleNamespace(control_group=None),
        recipe=SimpleNamespace(run=SimpleNamespace(profiled=steps)),
        job=SimpleNamespace(directory=directory), recorder=SimpleNamespace(warn=said.append),
    )  # fmt: skip
    return run, said


def test_a_profile_leaves_a_trace_and_no_hook(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(profiling.processes, "texts_of_all", lambda own, group: [*filter(None, own)])
    module = nn.Sequential(MLP(300, 300), nn.Dropout(0.5))
    engine = SimpleNamespace(module=module, optimizer=torch.optim.AdamW(module.parameters()))
    stepped = engine.optimizer.step
    run, said = run_of(engine, range(2, 4), tmp_path)
    profiler = profiling.StepProfiler(run)
    (begin,) = run.before_step
    for step in range(1, 5):
        begin(step)
        module(torch.randn(300, 300)).sum().backward()
        engine.optimizer.step()
        profiler.after_step(StepRecord(step, 1.0, False))
    assert said == []
    assert not module[0]._forward_hooks and engine.optimizer.step == stepped
    with gzip.open(tmp_path / "profile" / "steps-2-3-rank-3.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events]
    assert [name for name in names if name.startswith(STEP)] == [f"{STEP}2", f"{STEP}3"]
    assert names.count(f"{OWN}MLP") == names.count(f"{OWN}Dropout") == names.count(f"{OWN}optimizer") == 2


def test_a_full_disk_costs_the_trace_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(profiling.processes, "texts_of_all", lambda own, group: [*filter(None, own)])
    engine = SimpleNamespace(module=MLP(3, 3), optimizer=torch.optim.SGD([torch.zeros(1)]))
    (tmp_path / "profile").write_text("no folder")
    run, said = run_of(engine, range(1, 2), tmp_path)
    profiler = profiling.StepProfiler(run)
    run.before_step[0](1)
    profiler.after_step(StepRecord(1, 1.0, False))
    assert said[0].startswith(f"no trace of a rank: {tmp_path / 'profile'}")


def test_a_trace_is_named_by_the_steps_that_it_holds(tmp_path, monkeypatch):
    """A run resumed between them has the rest alone."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(profiling.processes, "texts_of_all", lambda own, group: [*filter(None, own)])
    engine = SimpleNamespace(module=MLP(3, 3), optimizer=torch.optim.SGD([torch.zeros(1)]))
    run, said = run_of(engine, range(5, 9), tmp_path)
    profiler = profiling.StepProfiler(run)
    for step in (7, 8):
        run.before_step[0](step)
        profiler.after_step(StepRecord(step, 1.0, False))
    assert said == []
    assert [file.name for file in (tmp_path / "profile").iterdir()] == ["steps-7-8-rank-0.json.gz"]


def test_a_recorder_leaves_profiled_steps_out_of_speeds(tmp_path):
    used = plan(recipe(run={"profile": "7:9"}))
    with recorder(tmp_path, used) as records:
        for step in range(1, 13):
            records.step(outcome(step, step=step, seconds=5.0 if 7 <= step <= 9 else 0.5, data_seconds=0.0))
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [each.step for each in found.steps if each.profiled] == [7, 8, 9]
    assert steady_seconds(found.steps)[:2] == (0.5, 4)


@pytest.mark.parametrize("written", ["4:3", "0:3", "1:21", "3", "a:b", "1:200", "613"])
def test_steps_that_the_run_does_not_have_are_refused(written):
    with pytest.raises(RecipeError, match="run.profile"):
        catalog.load("default/sotu", [f"run.profile={written}"], tiny=True)
    assert catalog.load("default/sotu", ["run.profile=20:20"], tiny=True).run.profiled == range(20, 21)


def test_a_run_without_a_profile_imports_none_of_it(tmp_path):
    script = tmp_path / "imports.py"
    script.write_text(
        "import sys, launch.training.loop\nsys.exit('launch.training.profiling' in sys.modules)"
    )
    assert run_ranks(1, script).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "how", [("zero3", "parallel.tp=2"), ("pipeline", "parallel.pp=2"), ("zero2", "seed=1")]
)
def test_a_profile_changes_no_number(how, tmp_path):
    """Also of a run that was stopped within it."""
    found = []
    for profiled in ("null", "3:5"):
        out = tmp_path / profiled.replace(":", "-")
        settings = ("--set", how[1], "--set", "run.prompt=null", "--set", f"run.profile={profiled}")
        flags = ("--tiny", "--steps", "6", "--ds_config", how[0], "--out", out, *settings)
        done = run_ranks(2, "launch/pretrain.py", *flags, timeout=900)
        assert done.returncode == 0, done.stdout[-3000:]
        steps = read_metrics(out / "metrics.jsonl").steps
        found.append([(step.loss, step.grad_norm) for step in steps])
    assert found[0] == found[1] and len(found[0]) == 6
    assert len(list((out / "profile").iterdir())) == 2
    assert Path(out / "profile" / "steps-3-5-rank-1.json.gz").stat().st_size > 1000
