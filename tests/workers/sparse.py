"""Checks of banded layers under tensor parallelism, and of their dropout. Run by modeling_checks.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from comparing import Group, both_passes, close, gathered, given_weights, randn, same_gradients
from randomness import all_differ, loss_and_gradients, seed_step

from modeling.gpt2 import GPT2Shape
from modeling.initialization import Init
from modeling.parallel.process_grid import ProcessGrid
from modeling.transformer import Attention, LayerShape, TransformerLayer
from recipes.families import Fixed, Window

B, S, H, HEADS, WINDOW = 2, 257, 16, 4, 40  # long enough for the kernel of blocks, and no multiple of a block
SHAPE = GPT2Shape(
    layers=2, hidden=16, heads=4, vocab=10, padded_vocab=16, positions=S,
    hidden_dropout=0.1, attention_dropout=0.3,
    windows=(None, WINDOW),
)  # fmt: skip


def banded_layer(group: Group, window: Window = WINDOW) -> None:
    """A whole layer against the dense one in one process: output, the input's and all joined gradients."""
    shape = LayerShape(H, HEADS, window=window)

    def build(group: Group, init: Init, shape: LayerShape = shape) -> TransformerLayer:
        return TransformerLayer(shape, group=group, init=init)

    init, x, cotangent = given_weights(build), randn(B, S, H), randn(B, S, H, seed=1)
    cut, whole = (
        both_passes(build(group, init), x, cotangent, group),
        both_passes(build(None, init), x, cotangent, None),
    )
    dense = both_passes(build(None, init, replace(shape, window=None)), x, cotangent, None)
    close(cut.output, whole.output, "output")
    close(cut.input_gradient, whole.input_gradient, "gradient of the input")
    same_gradients(cut.gradients, whole.gradients)
    close(whole.output[:, :WINDOW], dense.output[:, :WINDOW], "output of positions that see all before them")
    assert float((whole.output - dense.output).norm() / dense.output.norm()) > 1e-3, (
        "the band must leave something out"
    )


def banded_dropout(grid: ProcessGrid) -> None:
    """Each tensor rank drops weights of its own heads, and the stream outside does not move."""
    shape = LayerShape(H, HEADS, attention_dropout=0.3, window=WINDOW)
    attention = Attention(shape, group=grid.tensor_group, init=Init(seed=1, std=0.3, layers=1))
    x, of_values = randn(B, S, H, dtype=torch.float32), []
    attention.projection.register_forward_pre_hook(lambda module, args: of_values.append(args[0].detach()))
    with torch.no_grad():
        (
            attention.qkv.weight.fill_(0.1),
            attention.qkv.bias.fill_(1),
        )  # the same heads on every rank: dropout alone tells them apart
        seed_step(11, 3, grid.at)
        before = torch.get_rng_state()
        attention(x)
        moved = not torch.equal(before, torch.get_rng_state())
        attention.eval()(x)
    dropped, whole = (gathered(values, grid.tensor_group) for values in of_values)
    assert not moved, "attention drew from the stream outside of tensor-parallel regions"
    assert all_differ(dropped), "tensor ranks hold different heads: each must draw its own"
    assert all(torch.equal(values, whole[0]) for values in whole), "nothing is dropped in evaluation"


def banded_recomputation_is_exact(grid: ProcessGrid) -> None:
    for group in (None, grid.tensor_group):
        loss, gradients, _ = loss_and_gradients(grid, SHAPE, group)
        again, regained, passes = loss_and_gradients(grid, replace(SHAPE, checkpoint_interval=1), group)
        assert torch.equal(loss, again) and passes == 2 * SHAPE.layers
        assert all(torch.equal(*pair) for pair in zip(gradients, regained, strict=True)), f"group {group}"


CHECKS = {"banded layer": banded_layer, "fixed layer": partial(banded_layer, window=Fixed(WINDOW, 8, 3))}
GRID_CHECKS = {
    "banded dropout": banded_dropout,
    "banded recomputation is exact": banded_recomputation_is_exact,
}
