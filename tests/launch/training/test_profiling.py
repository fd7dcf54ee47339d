"""A profile: what it writes, where it says that the time went, and that nobody else pays for it."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launching import run_ranks
from recorded import outcome, plan, recipe, recorder
from torch import nn
from torch.autograd import DeviceType

from launch.records.facts import StepProfile
from launch.records.metrics import read_metrics
from launch.records.result import read_result, steady_seconds
from launch.records.result_text import result_text
from launch.training import profiling
from launch.training.profiling import STEP, seconds_by_kind
from recipes import catalog
from recipes.problems import RecipeError


@dataclass
class Event:
    """An event as torch's profiler gives it, in seconds; its methods are made of fields."""

    named: str
    start: float
    end: float
    number: int = 0
    linked: int = 0
    gradient: int = -1
    forward_thread: int = 0
    thread: int = 1
    device: DeviceType = DeviceType.CPU
    waits: bool = False

    def __post_init__(self) -> None:
        values = dict(
            name=self.named, start_ns=int(1e9 * self.start), end_ns=int(1e9 * self.end),
            correlation_id=self.number, linked_correlation_id=self.linked, sequence_nr=self.gradient,
            fwd_thread_id=self.forward_thread, start_thread_id=self.thread, device_type=self.device,
            is_async=self.waits, is_user_annotation=self.named.startswith("megarecipes"),
        )  # fmt: skip
        for name, value in values.items():
            setattr(self, name, lambda value=value: value)


ON_HOST = [
    Event(f"{STEP}3", 10, 30, number=1),
    Event("megarecipes: Attention", 11, 16, number=2),
    Event("_Row", 12, 16, number=3, gradient=7),  # waits for its collective
    Event("aten::mm", 12, 13, number=4),
    Event("c10d::allreduce_", 13, 13.5, number=5),
    Event("gloo:all_reduce", 13.25, 15, number=513, thread=2, waits=True),
    Event("aten::copy_", 13.5, 14, number=6, thread=2),  # of the backend's thread
    Event("autograd::engine::evaluate_function: _RowBackward", 17, 20, 7, gradient=7, forward_thread=1),
    Event("aten::mm", 17, 20, number=8),
    Event("Optimizer.step#AdamW.step", 20, 22, number=9),
    Event("aten::mm", 40, 50, number=10),  # in no step
]


def test_every_moment_of_a_step_counts_once_on_a_cpu():
    found = seconds_by_kind(ON_HOST, waited=1.5)
    assert found == pytest.approx(
        {"attention": 1 + 1 + 3, "all-reduce": 2, "optimizer": 2, "waiting for data": 1.5, "host": 9.5}
    )
    assert sum(found.values()) == pytest.approx(20)


def test_a_device_is_timed_by_its_kernels():
    """Collectives have what no computation hides, and a kernel the kind of what launched it."""
    gpu = dict(device=DeviceType.CUDA)
    kernels = [
        Event("gemm_f16", 14, 18, number=90, linked=4, **gpu),
        Event("gemm_f16", 18, 19, number=91, linked=8, **gpu),
        Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 17, 21, number=92, linked=5, **gpu),
        Event("Memcpy HtoD (Pinned -> Device)", 21, 22, number=93, linked=4, **gpu),
        Event("multi_tensor_apply_kernel", 23, 24, number=94, **gpu),
        Event(f"{STEP}3", 10, 30, number=95, **gpu),
        Event("cudaLaunchKernel", 12, 12.5, number=1, linked=4),
    ]
    found = seconds_by_kind([*ON_HOST, *kernels], waited=0.0)
    assert found == pytest.approx({"attention": 5, "all-reduce": 2, "copies": 1, "optimizer": 1, "host": 11})


class MLP(nn.Linear):
    pass


def test_a_profile_leaves_a_trace_and_no_hook(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(profiling.processes, "gathered", lambda own, group: [own, own])
    module = nn.Sequential(MLP(300, 300), nn.Dropout(0.5))
    engine = SimpleNamespace(module=module, optimizer=torch.optim.AdamW(module.parameters()))
    stepped, grid = engine.optimizer.step, SimpleNamespace(control_group=None)
    profiler = profiling.StepProfiler(engine, range(2, 4), grid, tmp_path / "profile")
    found = []
    for step in range(1, 5):
        profiler.begin(step)
        module(torch.randn(300, 300)).sum().backward()
        engine.optimizer.step()
        found.append(profiler.end(step, 0.0))
    assert found[:2] == [None, None] and found[3] is None
    profile = found[2]
    assert (profile.first, profile.last, profile.problems) == (2, 3, ())
    assert {"MLP", "layer norm and dropout", "optimizer", "host"} <= set(profile.shares)
    assert not module[0]._forward_hooks and engine.optimizer.step == stepped
    with gzip.open(tmp_path / "profile" / "steps-2-3-rank-3.json.gz") as file:
        events = json.load(file)["traceEvents"]
    steps = [event for event in events if event["name"].startswith(STEP)]
    assert [event["name"] for event in steps] == [f"{STEP}2", f"{STEP}3"]
    assert sum(profile.shares.values()) == pytest.approx(sum(e["dur"] for e in steps) / 2e6, rel=1e-3)


def test_a_full_disk_costs_the_trace_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(profiling.processes, "gathered", lambda own, group: [own])
    engine = SimpleNamespace(module=MLP(3, 3), optimizer=torch.optim.SGD([torch.zeros(1)]))
    (tmp_path / "profile").write_text("no folder")
    profiler = profiling.StepProfiler(
        engine, range(1, 2), SimpleNamespace(control_group=None), tmp_path / "profile"
    )
    profiler.begin(1)
    assert "profile" in profiler.end(1, 0.0).problems[0]


def test_a_trace_is_named_by_the_steps_that_it_holds(tmp_path, monkeypatch):
    """A run resumed between them has the rest alone."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(profiling.processes, "gathered", lambda own, group: [own])
    engine = SimpleNamespace(module=MLP(3, 3), optimizer=torch.optim.SGD([torch.zeros(1)]))
    profiler = profiling.StepProfiler(engine, range(5, 9), SimpleNamespace(control_group=None), tmp_path)
    for step in (7, 8):
        profiler.begin(step)
        found = profiler.end(step, 0.0)
    assert (found.first, found.last) == (7, 8)
    assert [file.name for file in tmp_path.iterdir()] == ["steps-7-8-rank-0.json.gz"]


def test_a_recorder_keeps_the_profile_and_leaves_its_steps_out_of_speeds(tmp_path):
    used = plan(recipe(run={"profile": "7:9"}))
    with recorder(tmp_path, used) as records:
        for step in range(1, 13):
            records.step(outcome(step, step=step, seconds=5.0 if 7 <= step <= 9 else 0.5, data_seconds=0.0))
            if step == 9:
                records.profile(StepProfile(7, 9, {"MLP": 3.0, "host": 1.0}))
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [each.step for each in found.steps if each.profiled] == [7, 8, 9]
    assert steady_seconds(found.steps)[:2] == (0.5, 4)
    assert found.profiles[0].shares == {"MLP": 3.0, "host": 1.0}


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
    result = read_result(out / "result.json")
    assert len(list((out / "profile").iterdir())) == 2 and "profiled" in result_text(result)
    assert {"attention", "MLP", "optimizer"} <= set(result.profile.shares)
    assert Path(out / "profile" / "steps-3-5-rank-1.json.gz").stat().st_size > 1000
