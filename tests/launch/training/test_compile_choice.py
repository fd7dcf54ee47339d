"""When a run is compiled, and what it says of the cost."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ds_configs.plan import GPU, HOST, Machine
from ds_configs.resolver import resolve
from launch.ranks import processes
from launch.training import compile_choice, compiling
from launch.training.compiling import Gain, payback
from modeling.layer_list import Stack
from recipes import catalog
from recipes.problems import ProblemsError

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(compile_choice.os, "sched_getaffinity", lambda _: {0, 1})


def plan(steps: int | None = None, tiny: bool = False):
    return resolve(catalog.load("default/sotu", tiny=tiny, steps=steps), "zero1", 1, CPU)


def test_a_long_run_is_compiled_and_a_short_or_an_emulated_one_is_not():
    assert compile_choice.compiles("auto", plan(), CPU)
    assert not compile_choice.compiles("auto", plan(), replace(CPU, emulated_fp16=True))
    assert not compile_choice.compiles("auto", plan(steps=20), CPU)
    assert not compile_choice.compiles("auto", plan(tiny=True), CPU)


def test_the_user_decides_where_they_say_so():
    assert compile_choice.compiles("on", plan(tiny=True), CPU)
    assert not compile_choice.compiles("off", plan(), CPU)
    assert not compile_choice.surely_pays(plan(), CPU) and compile_choice.surely_pays(plan(30_000), CPU)


def test_an_old_torch_compiles_no_tensor_parallel_layer(monkeypatch):
    halves = resolve(catalog.load("default/sotu", ["parallel.tp=2"]), "zero1", 2, CPU)
    assert compile_choice.compiles("auto", halves, CPU)
    monkeypatch.setattr(compile_choice, "version", lambda _: "2.11.0+cu130")
    assert not compile_choice.compiles("auto", halves, CPU) and compile_choice.compiles("auto", plan(), CPU)
    with pytest.raises(ProblemsError, match="tp=2 and torch 2.11.0"):
        compile_choice.compiles("on", halves, CPU)


def test_a_missing_compiler_is_said_where_something_is_lost_by_it():
    lacking = replace(CPU, compiler=False)
    assert not compile_choice.compiles("auto", plan(), lacking)
    said = compile_choice.explain_missing("auto", plan(), lacking)
    assert said is not None and "g++" in said
    assert compile_choice.explain_missing("auto", plan(), CPU) is None
    assert compile_choice.explain_missing("off", plan(), lacking) is None
    assert compile_choice.explain_missing("auto", plan(tiny=True), lacking) is None


def test_zero_3_on_a_gpu_is_compiled_on_request_alone(monkeypatch):
    monkeypatch.setattr(compile_choice, "has_compiler", lambda machine: True)
    gpu = Machine(GPU, fp16=True, bf16=True, compiler=True, libaio=False)
    recipe = catalog.load("default/sotu", steps=10**7)
    by_stage = {stage: resolve(recipe, f"zero{stage}", 1, gpu) for stage in (2, 3)}
    assert compile_choice.compiles("auto", by_stage[2], gpu)
    assert not compile_choice.compiles("auto", by_stage[3], gpu)
    assert compile_choice.compiles("on", by_stage[3], gpu)
    assert compile_choice.compiles("auto", by_stage[3], CPU)
    before_ampere = replace(gpu, bf16=False)
    assert not compile_choice.compiles("auto", by_stage[2], before_ampere)
    assert compile_choice.compiles("on", by_stage[2], before_ampere)


def test_the_step_at_which_compiling_is_paid_back():
    gains = [Gain("one layer", 0.5, 0.25, times=2)]  # 0.5 s of a micro-batch, 1 s of a step
    assert payback(gains, 16.0, accumulation=2, steps=100) == "paid back after 16 of 100 steps"
    assert payback(gains, 16.0, accumulation=2, steps=15) == "not paid back in this run"
    assert "saves nothing" in payback([Gain("a micro-batch", 0.2, 0.3)], 1.0, 1, 100)


def test_what_cannot_be_paid_back_is_not_begun(monkeypatch):
    """By the slowest rank, and by what is left of the run."""
    planned, grid = plan(), SimpleNamespace(at=None, control_group=None)
    layers, accumulation = planned.recipe.model.layers, planned.layout.accumulation
    a_step = 0.25 * layers * accumulation  # 0.25 s of each layer are no products
    monkeypatch.setattr(compiling, "_time_eager", lambda *of: (1.0, 0.75))
    monkeypatch.setattr(processes, "gathered", lambda own, group: [own, 2 * own])
    assert compiling.most_saved(planned, grid, 10) == 2 * 10 * a_step
    monkeypatch.setattr(compiling, "seed_step", lambda *of: None)
    monkeypatch.setattr(compiling, "_compile_layers", lambda *of: [Gain("one layer", 2.0, 1.0)])
    enough = math.ceil(compiling.USUAL_COST / (2 * a_step))
    for steps, begun in ((enough, True), (enough - 1, False), (None, True)):
        said = compiling.compile_module(torch.nn.Module(), planned, grid, steps)
        assert said.startswith("compiled: " if begun else "not compiled: it usually takes 40 s"), said
    monkeypatch.setattr(compiling, "_time_eager", lambda *of: (0.5, 0.75))
    assert compiling.most_saved(planned, grid, 10) == 0


def test_the_look_takes_three_passes_of_a_layer_and_of_its_products(monkeypatch):
    planned, grid, passes = plan(tiny=True), SimpleNamespace(tensor_group=None), []
    monkeypatch.setattr(compiling, "seconds_of_pass", lambda *of: passes.append(of[1:]) or float(of[0]()))
    compiling._time_eager(*compiling.model_shape(planned.recipe, 512).layer_kinds(), planned, grid)
    assert passes == [(1, 2), (1, 2)]
    clock = iter([0.0, 9.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.undo()
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: next(clock))
    assert compiling.seconds_of_pass(lambda: torch.ones(1, requires_grad=True).sum(), 1, 2) == 2.5


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
    module = object.__new__(Stack)
    monkeypatch.setattr(processes, "device", lambda: device)
    monkeypatch.setattr(compiling, "seed_step", lambda *of: None)
    monkeypatch.setattr(compiling, "prepare", lambda *of: None)
    monkeypatch.setattr(compiling, "_compile_whole", lambda *of: (2.0, 1.0))
    monkeypatch.setattr(compiling, "_compile_layers", lambda *of: [Gain("one layer", 2.0, 1.0)])
    said = compiling.compile_module(module, planned, SimpleNamespace(at=None))
    assert ("a micro-batch" in said, "one layer" in said) == (whole, not whole)
