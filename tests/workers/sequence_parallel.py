"""Checks of sequence parallelism, forward and gradients, against the dense layers; what it keeps.

Run by modeling_checks.py.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from comparing import (
    Group,
    Order,
    both_passes,
    close,
    gathered,
    given_weights,
    gradients,
    randn,
    recorded_collectives,
    same_gradients,
)
from tensor_parallel import HEADS, VOCAB, B, H, S, whole_model

from modeling.cost.activation_bytes import LayerActivations
from modeling.initialization import Init
from modeling.parallel.collectives import own_positions
from modeling.parallel.layers import ColumnParallelLinear
from modeling.transformer import MLP, Attention, LayerShape, TransformerLayer
from recipes.schema import Dropout, Model


def keeps_its_share(group: Group) -> None:
    """With sequence parallelism a product keeps no gathered input, and gathers it again in time."""
    size = dist.get_world_size(group)
    module = ColumnParallelLinear(H, H, group=group, init=Init(1, 0.02, layers=1), sequence=True)
    kept: list[int] = []
    x = randn(B, S // size, H, dtype=torch.float32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        output = module(x)
    with Order() as order:
        output.sum().backward()
    assert sorted(kept) == sorted([x.numel(), module.weight.numel()])
    gathers, product, scatters, ended = "all_gather_into_tensor", "mm", "reduce_scatter_tensor", "wait_tensor"
    assert order.seen == [gathers, product, ended, scatters, product, ended], order.seen


def keeps_what_is_predicted(group: Group) -> None:
    """A layer holds for its backward pass what the planner counts, but for a few numbers per token."""
    size = dist.get_world_size(group)
    model = Model(layers=1, hidden=H, heads=HEADS, vocab_size=VOCAB)
    for cut in (False, True):
        shape = LayerShape(H, HEADS, sequence_parallel=cut)
        layer = TransformerLayer(shape, group=group, init=Init(1, 0.02, layers=1))
        own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        held: dict[int, int] = {}

        def pack(tensor: torch.Tensor, own: set = own, held: dict = held) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        x = randn(B, S // size if cut else S, H, dtype=torch.float32).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = layer(x)
        output.sum().backward()  # what is held may be freed only now, and not before it was counted
        counted = LayerActivations(model, Dropout(), B * S, S, 4, size, sequence_parallel=cut)
        extra = 4 * B * S * 8  # means and deviations of LayerNorm, sums of the softmax
        assert 0 <= sum(held.values()) - counted.kept <= extra, (cut, held, counted.kept)


def sequence_block(kind: type, group: Group, one_graph: bool = False) -> None:
    """A block with sequence parallelism: what each rank has of output and input gradient, joined."""
    cut, dense = LayerShape(H, HEADS, sequence_parallel=True), LayerShape(H, HEADS)

    def build(group: Group, init: Init) -> torch.nn.Module:
        return kind(dense if group is None else cut, group=group, init=init)

    init, x, cotangent = given_weights(build), randn(B, S, H), randn(B, S, H, seed=1)
    module = build(group, init)
    used = torch.compile(module, fullgraph=True, backend="aot_eager") if one_graph else module
    y = own_positions(x, group).clone().requires_grad_()
    # A compiled module is not traced while something is recorded.
    with nullcontext([]) if one_graph else recorded_collectives() as seen:
        output = used(y)
        output.backward(own_positions(cotangent, group))
    with torch.no_grad():
        assert torch.equal(used(y), output)  # of a validation another graph is made
    torch._dynamo.reset()
    expected = both_passes(build(None, init), x, cotangent, None)
    close(torch.cat(gathered(output, group), 1), expected.output, "output")
    close(torch.cat(gathered(y.grad, group), 1), expected.input_gradient, "gradient of the input")
    same_gradients(gradients(module, group), expected.gradients)
    assert all(size <= x.numel() for _, size in seen)
    # Forward two of each product pair; backward f gathers again and scatters, and g gathers.
    blocks = 2 if kind is TransformerLayer else 1
    counts = {"all_gather_into_tensor": 3 * blocks, "reduce_scatter_tensor": 2 * blocks}
    counts |= {"all_reduce_": blocks} if kind is TransformerLayer else {}
    assert one_graph or Counter(name for name, _ in seen) == counts, seen


CHECKS = {
    "its share is kept": keeps_its_share,
    "memory of a layer": keeps_what_is_predicted,
    "sequence attention": partial(sequence_block, Attention),
    "sequence mlp": partial(sequence_block, MLP),
    "sequence layer": partial(sequence_block, TransformerLayer),
    "sequence layer in one graph": partial(sequence_block, TransformerLayer, one_graph=True),
    "sequence model": partial(whole_model, sequence=True),
}
