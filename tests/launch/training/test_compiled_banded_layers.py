"""Banded layers under torch.compile: block masks stay outside of the graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention

from launch.training import compiling
from modeling import sparse_attention as band
from modeling.families import model_shape
from modeling.initialization import Init
from modeling.transformer import Attention, LayerShape, TransformerLayer
from recipes import catalog

POSITIONS, WINDOW = 256, 40


@pytest.fixture
def made(monkeypatch) -> list[int]:
    """Choose flex_attention on a CPU, where it has a forward pass; the lengths of block masks made."""
    lengths, create = [], flex_attention.create_block_mask

    def noted(*args, **more):
        lengths.append(args[3])
        return create(*args, **more)

    monkeypatch.setattr(flex_attention, "create_block_mask", noted)
    monkeypatch.setattr(
        band, "choose", lambda *args, **more: band.KernelChoice("flex_attention", "asked for")
    )
    yield lengths
    torch.compiler.reset()


def layer(prepared: bool, window: int = WINDOW) -> Attention:
    shape = LayerShape(hidden=32, heads=2, window=window)
    attention = Attention(shape, group=None, init=Init(seed=0, std=0.3, layers=1))
    if prepared:
        attention.prepare(POSITIONS, torch.device("cpu"), torch.float32)
    return attention


def shapes_in(graphs) -> list[tuple[int, ...]]:
    values = [node.meta.get("example_value") for graph in graphs for node in graph.graph.nodes]
    return [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.ci
@pytest.mark.parametrize("prepared", [True, False])
def test_the_block_mask_is_made_once_and_outside_of_the_graph(prepared, made):
    """A prepared layer is one graph; another is cut, and right all the same."""
    # A window of its own: masks of other tests are kept.
    attention, graphs = layer(prepared, WINDOW + 1 + prepared), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attention, backend=keep)
    for batch in (1, 2, 3):
        x = torch.randn(batch, POSITIONS, 32)
        with torch.no_grad():
            q, k, v = attention.qkv(x).view(batch, POSITIONS, 2, 3, 16).permute(3, 0, 2, 1, 4).unbind(0)
            masked = band.by_dense_mask(q, k, v, attention.window).transpose(1, 2)
            expected = attention.projection(masked.reshape(x.shape))
            torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    assert made == [POSITIONS], "made once, before the first call or in it"
    compared = [shape for shape in shapes_in(graphs) if shape[-2:] == (POSITIONS, POSITIONS)]
    assert not compared, "comparisons are in the graph"
    assert any("flex_attention" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    if prepared:
        with torch.no_grad():
            explained = torch._dynamo.explain(attention)(x)
        assert explained.graph_count == 1 and explained.graph_break_count == 0


def test_a_mask_of_another_length_is_not_used(made):
    attention = layer(prepared=True)
    q = torch.randn(1, 2, 384, 16)
    compiled = torch.compile(band.by_flex, backend="eager")
    with torch.no_grad():
        found = compiled(q, q, q, WINDOW, attention.block_mask)
    torch.testing.assert_close(found, band.by_dense_mask(q, q, q, WINDOW), rtol=1e-4, atol=1e-4)


def plan_of(*settings: str) -> SimpleNamespace:
    recipe = catalog.load("default/sotu", settings, tiny=True)
    return SimpleNamespace(recipe=recipe, precision="fp32", padded_vocab=512, zero_stage=3)


def test_every_banded_layer_is_prepared_where_the_kernel_wants_it(made, monkeypatch):
    """A dense one has nothing to prepare."""
    prepared: list[int | None] = []
    monkeypatch.setattr(torch, "compile", lambda what: what)
    prepare = Attention.prepare

    def noted(self, *of):
        prepare(self, *of)
        prepared.append(self.block_mask and self.window)

    monkeypatch.setattr(Attention, "prepare", noted)
    plan = plan_of("model.attention=[dense,dense,banded]", "model.attention_window=24", "sequence_length=256")
    shape = model_shape(plan.recipe, 512)
    init = Init(seed=0, std=0.1, layers=4)
    layers = [TransformerLayer(shape.layer_at(i), group=None, init=init) for i in range(4)]
    module = nn.Module()
    module.layers, module.loss_fn = nn.ModuleList(layers), SimpleNamespace(function=None)
    compiling.compile_module(module, plan)
    assert prepared == [None, None, 24, None]
    masks = [each.attention.block_mask for each in layers if each.attention.window]
    assert [mask.seq_lengths for mask in masks] == [(256, 256)]
