"""Branches for GPUs, taken on a CPU by setting the facts of the device (`processes.device`).

What asks                                                    which test takes it
overlap_comm, kind of ZeRO-1's optimizer, leaves of ZeRO-3   test_training_beside_the_host
compilation under ZeRO-3, before Ampere, layer by layer      test_zero_3_without…, test_compile_choice.py
partition_activations, precision "auto", what needs a GPU    tests/ds_configs (ANY_GPU)
pinned batches and the device of the loader's threads        test_batches_are_pinned…
marks of the forward clock                                   test_the_forward_clock_reads_events
peaks, GPUs in descriptions and in a plan's checks                test_memory_and_names…, test_checkup.py
a device for each rank                                       tests/launch/ranks/test_processes.py
kernels of banded attention                                  test_sparse_attention.py, test_banded_models.py
nothing of a GPU that is not to be used                      test_a_gpu_that_is_not_to_be_used…
"""

from __future__ import annotations

import json
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from launching import WORKERS, run, run_ranks

from data.corpus import build
from ds_configs.plan import ANY_GPU, GPU, HOST, Device, Machine
from ds_configs.resolver import resolve
from launch.checkpoints import run_checkpoints
from launch.machine import checks, description, drivers, memory
from launch.ranks import processes
from launch.training import job
from launch.training import run as training_run
from launch.training.micro_batches import training_batches
from recipes import catalog

BESIDE = Device("cpu", asynchronous=True, own_memory=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of two ranks by name: losses by step, and facts of the engine."""
    out = tmp_path_factory.mktemp("beside")
    fp32, bf16 = {"precision": "fp32"}, {"precision": "bf16"}
    runs = [  # name, case, steps, source
        ("bf16", {**bf16, "ds_config": "zero1", "dp": 2}, 4, None),
        ("bf16 stopped", {**bf16, "ds_config": "zero1", "dp": 2}, 2, None),
        ("bf16 resumed", {**bf16, "ds_config": "zero1", "dp": 2}, 4, "bf16 stopped"),
        ("fp32", {**fp32, "ds_config": "zero1", "dp": 2}, 6, None),
        ("zero1", {**fp32, "ds_config": "zero1", "dp": 2}, 2, None),
        ("zero3", {**fp32, "ds_config": "zero3", "dp": 2}, 4, "zero1"),
        ("tp2 zero2", {**fp32, "ds_config": "zero2", "tp": 2}, 6, "zero3"),
    ]
    steps = {name: ends for name, _, ends, _ in runs}
    places = {name: run_checkpoints.directory_of(out / name / "checkpoints", steps[name]) for name in steps}
    jobs = [
        {"out": str(out / name), "case": case, "steps": ends, "source": source and str(places[source])}
        for name, case, ends, source in runs
    ]
    (out / "jobs.json").write_text(json.dumps(jobs))
    done = run_ranks(2, WORKERS / "beside_host.py", out / "jobs.json", timeout=400)
    assert done.returncode == 0, done.stdout[-4000:]

    def read(name):
        return [json.loads((out / name / file).read_text()) for file in ("losses.json", "engine.json")]

    return {name: SimpleNamespace(losses=read(name)[0], **read(name)[1]) for name in steps}


@pytest.mark.ci
def test_training_beside_the_host(trained):
    """ZeRO-1 in bf16 takes the optimizer that it takes on a GPU; no layer of ZeRO-3 is gathered whole."""
    assert trained["bf16"].optimizer == "FlatStep" and trained["bf16"].overlaps
    assert trained["tp2 zero2"].overlaps and not trained["zero3"].whole
    resumed = trained["bf16 resumed"].losses
    assert sorted(resumed) == ["3", "4"] and resumed == {
        step: trained["bf16"].losses[step] for step in resumed
    }
    for name in ("zero1", "zero3", "tp2 zero2"):
        for step, loss in trained[name].losses.items():
            assert loss == pytest.approx(trained["fp32"].losses[step], abs=2e-6), (name, step)


@pytest.mark.long
def test_zero_3_without_leaves_breaks_the_graph_of_a_layer_and_is_not_compiled_by_itself(
    tmp_path, monkeypatch
):
    """Compilation is "auto" only where a layer is one graph; the loss is another."""
    monkeypatch.setattr(job, "has_compiler", lambda machine: True)
    cases = [("zero3", HOST), ("zero3", BESIDE), ("zero1", BESIDE)]
    given = [{"ds_config": name, "asynchronous": device.asynchronous} for name, device in cases]
    (tmp_path / "cases.json").write_text(json.dumps(given))
    done = run_ranks(1, WORKERS / "compiled_hooks.py", tmp_path / "counts.json", tmp_path / "cases.json")
    assert done.returncode == 0, done.stdout[-4000:]
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert [count["graphs"] == 2 for count in counts] == [True, False, True], counts
    for (name, device), count in zip(cases, counts, strict=True):
        machine = Machine(device, fp16=False, bf16=True, compiler=True, libaio=False)
        plan = resolve(catalog.load("default/sotu", steps=10**7), name, 1, machine)
        assert job.compiles("auto", plan, machine) is not bool(count["breaks"]), count


@pytest.mark.parametrize("device", [HOST, GPU], ids=["cpu", "gpu"])
def test_batches_are_pinned_for_a_device_with_memory_of_its_own_by_threads_that_chose_it(monkeypatch, device):
    recipe = catalog.load("default/sotu", tiny=True)
    plan = resolve(recipe, "zero1", 1, ANY_GPU)
    corpus = build(recipe, say=lambda text: None)
    chosen, pinned = {}, []
    monkeypatch.setattr(processes, "device", lambda: device)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    own = threading.get_ident
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda n: chosen.update({own(): n}))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(chosen[own()]) or x.clone())
    batches = training_batches(plan, corpus, SimpleNamespace(at=SimpleNamespace(dp=0)), None)
    fields = sum(map(len, next(batches)))
    batches.close()
    assert {*pinned} == ({3} if device.own_memory else set()) and (len(pinned) >= fields) == device.own_memory


def test_the_forward_clock_reads_events(monkeypatch):
    class Event:
        times = iter((10.0, 30.0, 100.0, 105.0))  # ms

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(self.times)

        def query(self):
            return hasattr(self, "waited")

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert hasattr(end, "at") and (end.at < 100 or end.query())  # the last pass has ended
            return end.at - self.at

    monkeypatch.setattr(processes, "device", lambda: GPU)
    monkeypatch.setattr(training_run, "get_accelerator", lambda: SimpleNamespace(Event=Event))
    engine = torch.nn.Identity()
    engine.module = torch.nn.Identity().train()
    clock = training_run.ForwardClock(engine)
    for _ in range(2):
        engine(torch.ones(1))
    assert clock.take() == pytest.approx(0.025) and clock.take() == 0.0


def test_memory_and_names_are_those_of_the_device_whoever_made_it(monkeypatch):
    """Intel's and AMD's GPUs: no compute capability, and no refusal for it."""
    facts = SimpleNamespace(name="Intel Max 1550", total_memory=64e9, major=12, minor=0)
    torch_xpu = SimpleNamespace(
        get_device_properties=lambda number: facts,
        mem_get_info=lambda number: (60e9, 64e9), max_memory_allocated=lambda: 5,
        max_memory_reserved=lambda: 7,
    )  # fmt: skip
    monkeypatch.setattr(processes, "device", lambda: Device("xpu", asynchronous=True, own_memory=True))
    monkeypatch.setattr(processes, "device_limit", lambda: 2)
    monkeypatch.setattr(processes, "check_device", lambda: 0)
    monkeypatch.setattr(torch, "xpu", torch_xpu)
    described = description.describe()
    assert described["accelerator"] == facts.name and description.summary(described).startswith("2 x Intel")
    assert (described["accelerators"], described["accelerator_memory_gb"]) == (2, 64.0)
    assert memory.peak_memory() == memory.PeakMemory(5, "GPU memory allocated")
    assert memory.peak_cached_bytes() == 7 and memory.this_machine().gpu_bytes == 64e9
    monkeypatch.setattr(checks, "built_for", lambda: ["gfx90a"])
    assert drivers.accelerator().verdict == checks.kernels().verdict == "ok"
    assert processes.device_identity() is None, "no serial number that ranks could share"


def test_a_gpu_that_is_not_to_be_used_is_asked_nothing(tmp_path):
    """With DS_ACCELERATOR=cpu no context is opened on the machine's GPU, and nothing is told of it."""
    script = tmp_path / "train.py"
    script.write_text(f"""
import runpy, sys, torch

def refuse(*args, **named):
    raise AssertionError("CUDA was asked")

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
for name in ("_lazy_init", "current_device", "set_device", "get_device_properties", "get_device_name",
             "get_device_capability", "mem_get_info", "max_memory_allocated", "max_memory_reserved"):
    setattr(torch.cuda, name, refuse)
torch.Tensor.pin_memory = refuse
sys.argv = ["pretrain.py", *"--tiny --steps 2 --ds_config zero1 --out".split(), {str(tmp_path / "run")!r}]
runpy.run_module("launch.pretrain", run_name="__main__")
""")
    done = run([sys.executable, str(script)], env={"CUDA_VISIBLE_DEVICES": "0"}, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
    described = json.loads((tmp_path / "run" / "result.json").read_text())
    assert "GPU" not in done.stdout.replace("TFLOPS per GPU", "") and "resident set" in done.stdout, described
