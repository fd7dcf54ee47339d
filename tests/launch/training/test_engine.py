"""What a GPU finds in the engine's model: everything on its own device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.training import engine
from launch.training.build_model import build_module
from modeling.hidden_dropout import salts_of
from recipes import catalog

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
DROPOUT = ["dropout.hidden=0.1"]
META = torch.device("meta")
ALONE = SimpleNamespace(tp=1, pp=1, dp=1, tensor_group=None)


def built() -> nn.Module:
    """A GPT-2 with dropout of which the parameters alone are on a device, as zero.Init moves them."""
    recipe = catalog.load("default/sotu", DROPOUT, tiny=True)
    model = build_module(resolve(recipe, "zero1", 1, CPU), ALONE)
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().to(META))
    return model.train()


def step(model: nn.Module) -> torch.Tensor:
    """Loss and gradients of two samples of eight tokens."""
    tokens = torch.zeros(2, 8, dtype=torch.int64, device=META)
    salts = salts_of(1, 0, torch.arange(2, device=META), 8)
    loss = model(tokens, tokens, torch.ones(2, 8, device=META), salts=salts)
    loss.backward()
    return loss


def test_a_step_finds_all_it_needs_on_the_device_of_the_parameters():
    model = built()
    with pytest.raises(RuntimeError, match="cpu"):
        step(model)  # else this test would not notice what is left behind
    engine.move_buffers(model, META)
    assert step(model).device == META


def test_an_engine_has_its_buffers_where_it_computes(monkeypatch):
    model = built()
    made = SimpleNamespace(device=META, fp16_enabled=lambda: False)
    plan = resolve(catalog.load("default/sotu", DROPOUT, tiny=True), "zero3", 1, CPU)
    monkeypatch.setattr(engine.compiled_ops, "prepare", lambda *_: None)
    monkeypatch.setattr(engine.deepspeed.checkpointing, "configure", lambda *_, **__: None)
    monkeypatch.setattr(engine, "build_module", lambda *_, **__: model)
    monkeypatch.setattr(engine.deepspeed, "initialize", lambda **_: (made,))
    monkeypatch.setattr(engine, "shorten_step", lambda *_: None)
    job = SimpleNamespace(plan=plan, compiled=False, initial_weights=None)
    engine.build_engine(job, SimpleNamespace(control_group=None), print)
    assert {buffer.device for buffer in model.buffers()} == {META}
