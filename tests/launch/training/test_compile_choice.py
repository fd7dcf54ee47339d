"""When a run is compiled, and which of its parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_configs.plan import GPU, HOST, Machine
from ds_configs.resolver import resolve
from launch.ranks import processes
from launch.training import compiling, job
from modeling.layer_list import Stack
from recipes import catalog
from recipes.problems import ProblemsError

LONG = 30_000  # steps
CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(job.os, "sched_getaffinity", lambda _: {0, 1})


def plan(steps: int | None = None, tiny: bool = False):
    return resolve(catalog.load("default/sotu", tiny=tiny, steps=steps), "zero1", 1, CPU)


def test_a_long_run_is_compiled_and_a_short_or_an_emulated_one_is_not():
    assert job.compiles("auto", plan(LONG), CPU)[0]
    assert not job.compiles("auto", plan(LONG), replace(CPU, emulated_fp16=True))[0]
    assert not job.compiles("auto", plan(), CPU)[0]
    assert not job.compiles("auto", plan(tiny=True), CPU)[0]


def test_the_user_decides_where_they_say_so():
    assert job.compiles("on", plan(tiny=True), CPU)[0]
    assert not job.compiles("off", plan(LONG), CPU)[0]


def test_an_old_torch_compiles_no_tensor_parallel_layer(monkeypatch):
    halves = resolve(catalog.load("default/sotu", ["parallel.tp=2"], steps=LONG), "zero1", 2, CPU)
    assert job.compiles("auto", halves, CPU)[0]
    monkeypatch.setattr(job, "version", lambda _: "2.11.0+cu130")
    assert not job.compiles("auto", halves, CPU)[0]
    assert job.compiles("auto", plan(LONG), CPU)[0]
    with pytest.raises(ProblemsError, match="tp=2 and torch 2.11.0"):
        job.compiles("on", halves, CPU)


def test_a_missing_compiler_is_said_where_something_is_lost_by_it():
    lacking = replace(CPU, compiler=False)
    compiled, said = job.compiles("auto", plan(LONG), lacking)
    assert not compiled and "g++" in said
    assert job.compiles("auto", plan(LONG), CPU) == (True, None)
    assert job.compiles("off", plan(LONG), lacking) == job.compiles("auto", plan(), lacking) == (False, None)
    with pytest.raises(ProblemsError, match="leave --compile out"):
        job.compiles("on", plan(), lacking)


def test_zero_3_on_a_gpu_is_compiled_on_request_alone(monkeypatch):
    monkeypatch.setattr(job, "has_compiler", lambda machine: True)
    gpu = Machine(GPU, fp16=True, bf16=True, compiler=True, libaio=False)
    recipe = catalog.load("default/sotu", steps=10**7)
    by_stage = {stage: resolve(recipe, f"zero{stage}", 1, gpu) for stage in (2, 3)}
    assert job.compiles("auto", by_stage[2], gpu)[0]
    assert not job.compiles("auto", by_stage[3], gpu)[0]
    assert job.compiles("on", by_stage[3], gpu)[0]
    assert job.compiles("auto", by_stage[3], CPU)[0]
    before_ampere = replace(gpu, bf16=False)
    assert not job.compiles("auto", by_stage[2], before_ampere)[0]
    assert job.compiles("on", by_stage[2], before_ampere)[0]


WHOLE = [
    ("zero1", 1, (), HOST, True),
    ("zero1", 1, (), GPU, True),
    ("zero1", 2, ("parallel.tp=2",), GPU, True),
    ("zero1", 2, (), HOST, True),
    ("zero1", 2, (), GPU, False),  # gradients travel while the layers before theirs are computed
    ("zero0", 2, (), GPU, False),
    ("zero3", 1, (), HOST, False),  # parameters are gathered layer by layer
    ("zero1", 1, ("activation_checkpointing=full",), HOST, False),
]


@pytest.mark.parametrize(("ds_config", "ranks", "settings", "device", "whole"), WHOLE)
def test_what_is_compiled_as_a_whole_and_what_layer_by_layer(
    ds_config, ranks, settings, device, whole, monkeypatch
):
    planned = resolve(catalog.load("default/sotu", settings, tiny=True), ds_config, ranks, CPU)
    module, loss, compiled = object.__new__(Stack), object(), []
    torch.nn.Module.__init__(module)
    module.loss = loss
    monkeypatch.setattr(processes, "device", lambda: device)
    monkeypatch.setattr(compiling, "prepare", lambda *of: None)
    monkeypatch.setattr(Stack, "compile", lambda self: compiled.append(self))
    monkeypatch.setattr(torch, "compile", lambda what: compiled.append(what) or what)
    said = compiling.compile_module(module, planned)
    assert compiled == ([module] if whole else [loss])
    assert said.endswith("the whole model" if whole else "every transformer layer, and the loss")
