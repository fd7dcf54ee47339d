"""Checks of every tensor-parallel layer, forward and gradients, against the dense one.

Run by modeling_checks.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparing import (
    Group,
    Order,
    both_passes,
    close,
    equal_on_all_ranks,
    gathered,
    given_weights,
    gradients,
    joined,
    randn,
    recorded_collectives,
    same_gradients,
)
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from safetensors.torch import load_file
from torch.distributed import distributed_c10d

from modeling.gpt2 import FAMILY, GPT2Shape
from modeling.initialization import Init, canonical_name
from modeling.layer_list import Stack
from modeling.parallel.collectives import reduce_from_tensor_parallel, with_summed_gradients
from modeling.parallel.cross_entropy import token_losses
from modeling.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from modeling.parallel.process_grid import ProcessGrid
from modeling.transformer import MLP, Attention, LayerShape, TransformerLayer
from recipes.layout import data_groups, tensor_groups

B, S, H, HEADS = 2, 8, 32, 4
VOCAB, PADDED = (
    10,
    16,
)  # tp 4: rows 0-3, 4-7, 8-9 and two of padding, padding alone; tp 2: 0-7, 8-9 and six of padding


def f_and_g(group: Group) -> None:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    x = randn(B, S).requires_grad_()
    (entered,) = with_summed_gradients(group, x)
    summand = float(rank + 1) * torch.ones(B, S, dtype=x.dtype)
    kept = summand.clone()
    (at_f,) = torch.autograd.grad(entered, x, summand)

    part = float(rank + 1) * x.detach()
    part.requires_grad_()
    before = part.detach().clone()
    left = reduce_from_tensor_parallel(part, group)
    (at_g,) = torch.autograd.grad(left, part, kept)

    total = size * (size + 1) / 2
    assert torch.equal(entered, x), "f must be the identity forward"
    assert torch.equal(at_f, torch.full_like(x, total)), "f must sum the gradients of the ranks"
    assert torch.equal(summand, kept), "f changed a gradient that belongs to autograd"
    close(left, total * x, "the sum that g makes")
    assert torch.equal(part, before), "g changed its input"
    assert torch.equal(at_g, kept), "g must pass the gradient as it is"
    assert with_summed_gradients(None, x) == (x,) and reduce_from_tensor_parallel(x, None) is x


def column_parallel_linear(group: Group) -> None:
    def build(group: Group, init: Init) -> ColumnParallelLinear:
        return ColumnParallelLinear(H, 3 * H, group=group, init=init)

    init, x, cotangent = given_weights(build), randn(B, S, H), randn(B, S, 3 * H, seed=1)
    own = cotangent.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)]
    cut, dense = (
        both_passes(build(group, init), x, own, group),
        both_passes(build(None, init), x, cotangent, None),
    )
    output = torch.cat(gathered(cut.output, group), -1)
    close(output, dense.output, "output")
    close(cut.input_gradient, dense.input_gradient, "gradient of the input")
    same_gradients(cut.gradients, dense.gradients)


def summed_while_multiplying(group: Group) -> None:
    """f's all-reduce runs while the product of the weight's gradient does."""
    module = ColumnParallelLinear(H, 3 * H, group=group, init=Init(seed=1, std=0.02, layers=1))
    output = module(randn(B, S, H, dtype=torch.float32).requires_grad_())
    with Order() as order:
        output.sum().backward()
    assert order.seen == ["mm", "all_reduce_", "mm", "wait_tensor"], order.seen


def one_graph(group: Group) -> None:
    """torch.compile traces a layer with its collectives, forward and backward, without a break."""

    def build(group: Group, init: Init) -> torch.nn.Module:
        return TransformerLayer(LayerShape(H, HEADS), group=group, init=init)

    init, x, cotangent = given_weights(build), randn(B, S, H), randn(B, S, H, seed=1)
    module = build(group, init)
    eager = both_passes(module, x, cotangent, group)
    module.zero_grad()
    try:
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        found = both_passes(compiled, x, cotangent, group)
        with torch.no_grad():
            assert torch.equal(compiled(x), found.output)  # of a validation another graph is made
    finally:
        torch._dynamo.reset()
    close(found.output, eager.output, "output")
    close(found.input_gradient, eager.input_gradient, "gradient of the input")
    same_gradients(found.gradients, eager.gradients)


def row_parallel_linear(group: Group) -> None:
    def build(group: Group, init: Init) -> RowParallelLinear:
        return RowParallelLinear(4 * H, H, group=group, init=init)

    init, x, cotangent = given_weights(build), randn(B, S, 4 * H), randn(B, S, H, seed=1)
    own = x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)]
    cut, dense = (
        both_passes(build(group, init), own, cotangent, group),
        both_passes(build(None, init), x, cotangent, None),
    )
    input_gradient = torch.cat(gathered(cut.input_gradient, group), -1)
    close(cut.output, dense.output, "output")
    close(input_gradient, dense.input_gradient, "gradient of the input")
    same_gradients(cut.gradients, dense.gradients)


def embedding(group: Group) -> VocabParallelEmbedding:
    init = given_weights(build_embedding)
    return build_embedding(group, init)


def build_embedding(group: Group, init: Init) -> VocabParallelEmbedding:
    return VocabParallelEmbedding(VOCAB, PADDED, H, group=group, init=init)


def vocabulary_rows(group: Group) -> None:
    """Which rows a rank holds, and that rows beyond the vocabulary are zero."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    module = embedding(group)
    valid = {2: [8, 2], 4: [4, 4, 2, 0]}[size][rank]
    assert (module.first, module.rows, module.valid) == (rank * PADDED // size, PADDED // size, valid)
    assert module.weight.shape == (PADDED // size, H) and not module.weight[valid:].any()
    assert not (module.weight[:valid] == 0).any()


def embedding_and_tied_projection(group: Group) -> None:
    """The same weight looked up and projected onto, in one graph: its gradient is the sum of both uses."""
    tokens = torch.arange(VOCAB).repeat(2).view(4, 5)
    cotangent = randn(4, 5, PADDED, seed=2)
    columns = cotangent.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)]
    cut, dense = embedding(group), embedding(None)

    embedded = cut(tokens)
    logits = cut(embedded * 2, project=True)
    kept = torch.isfinite(logits)
    torch.where(kept, logits * columns, 0).sum().backward()
    embedded_dense = dense(tokens)
    logits_dense = dense(embedded_dense * 2, project=True)
    (logits_dense[..., :VOCAB] * cotangent[..., :VOCAB]).sum().backward()

    whole = torch.cat(gathered(logits, group), -1)
    gradient = joined(cut.weight, cut.weight.grad, group)
    close(embedded, embedded_dense, "embedding")
    close(whole[..., :VOCAB], logits_dense[..., :VOCAB], "logits")
    for every in (whole, logits_dense):
        assert (every[..., VOCAB:] == float("-inf")).all(), "padding must get no probability"
    close(gradient[0], joined(dense.weight, dense.weight.grad, None)[0], "gradient of the tied weight")
    assert not cut.weight.grad[cut.valid :].any(), "padding must get no gradient"


def cross_entropy(group: Group, dtype: torch.dtype = torch.float32, offset: float = 0.0) -> None:
    """Against torch's on the full logits: with padding, large ones (`offset`), every token as a target."""
    targets = torch.arange(VOCAB).view(2, 5)
    full = torch.cat(
        [randn(2, 5, VOCAB, seed=3) * 3 + offset, torch.full((2, 5, PADDED - VOCAB), float("-inf"))], -1
    ).to(dtype)
    cotangent = randn(2, 5, seed=4, dtype=torch.float32)
    mine = full.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].clone().requires_grad_()
    with recorded_collectives() as seen:
        losses = token_losses(mine, targets, group)
        losses.backward(cotangent)
    gradient = torch.cat(gathered(mine.grad, group), -1)

    reference = full[..., :VOCAB].double().requires_grad_()
    expected = F.cross_entropy(reference.flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    expected.backward(cotangent.double())

    assert losses.dtype == torch.float32 and mine.grad.dtype == dtype
    close(losses, expected, "losses", 1e-6)
    close(
        gradient[..., :VOCAB],
        reference.grad,
        "gradient of the logits",
        1e-6 if dtype == torch.float32 else 4e-3,
    )
    assert not gradient[..., VOCAB:].any(), "padding must get no gradient"
    assert [name for name, _ in seen] == ["all_reduce"] * 2, (
        f"two all-reduces forward and none backward, but there were {seen}"
    )
    assert max(size for _, size in seen) == 2 * targets.numel(), (
        f"a collective moved more than two numbers per token: {seen}"
    )


def block(kind: type, group: Group) -> None:
    """A whole block: output and input gradient on every rank, and every gradient joined."""
    shape = LayerShape(H, HEADS)

    def build(group: Group, init: Init) -> torch.nn.Module:
        return kind(shape, group=group, init=init)

    init, x, cotangent = given_weights(build), randn(B, S, H), randn(B, S, H, seed=1)
    with recorded_collectives() as seen:
        module, y = build(group, init), x.clone().requires_grad_()
        output = module(y)
        output.backward(cotangent)
    found = gradients(module, group)
    dense = both_passes(build(None, init), x, cotangent, None)
    close(output, dense.output, "output")
    close(y.grad, dense.input_gradient, "gradient of the input")
    same_gradients(found, dense.gradients)
    # One of g forward and one of f backward for each of attention and MLP (Megatron-LM, figure 4).
    expected = [("all_reduce_", B * S * H)] * (4 if kind is TransformerLayer else 2)
    assert seen == expected, f"collectives {seen}, expected {expected}"


SHAPE = GPT2Shape(layers=3, hidden=H, heads=HEADS, vocab=VOCAB, padded_vocab=PADDED, positions=S)


def build_gpt2(group: Group, init: Init) -> Stack:
    return FAMILY.plain(SHAPE, group=group, init=init)


def whole_model(group: Group, sequence: bool = False) -> None:
    shape = replace(SHAPE, sequence_parallel=sequence)

    def build_gpt2(group: Group, init: Init) -> Stack:
        return FAMILY.plain(shape, group=group, init=init)

    init = given_weights(build_gpt2, dtype=torch.float32)
    tokens, labels = (torch.arange(B * S).view(B, S) * k % VOCAB for k in (3, 7))
    weights = torch.full((B, S), 1 / (B * S))
    found = {}
    for name, used in (("cut", group), ("dense", None)):
        model = build_gpt2(used, init)
        loss = model(tokens, labels, weights)
        loss.backward()
        found[name] = loss.detach(), gradients(model, used)
    close(found["cut"][0], found["dense"][0], "loss", 1e-6)
    same_gradients(found["cut"][1], found["dense"][1], 2e-5)


def initial_weights(group: Group) -> None:
    """Drawn slices join to the full draw, copies are equal on all ranks; only shards are marked."""
    init = Init(seed=5, std=0.02, layers=SHAPE.layers)
    cut, dense = build_gpt2(group, init), build_gpt2(None, init)
    full = {canonical_name(p): joined(p, p, None)[0] for p in dense.parameters()}
    found = {canonical_name(p): joined(p, p, group) for p in cut.parameters()}
    marked = {canonical_name(p) for p in cut.parameters() if getattr(p, "tensor_model_parallel", False)}
    assert found.keys() == full.keys()
    for name, copies in found.items():
        for copy in copies:
            assert torch.equal(copy, full[name]), name
    assert marked == {canonical_name(p) for p in cut.parameters() if p.shard is not None}
    cut_layers = {"word.weight"} | {f"layers.{i}.{n}" for i in range(SHAPE.layers) for n in SHARDED}
    assert marked == cut_layers, marked ^ cut_layers
    assert not any(getattr(p, "tensor_model_parallel", False) for p in dense.parameters())


def pipeline_takes_the_groups(grid: ProcessGrid) -> None:
    """DeepSpeed's own grid of a pipeline makes no communicator that is there."""
    degrees = grid.tp, 4 // grid.tp, 1
    own, made = ProcessGrid(*degrees), distributed_c10d._world.pg_map
    before = {*made}
    with own.lend_groups():
        topology = PipeModelDataParallelTopology(num_pp=own.pp, num_mp=own.tp, num_dp=own.dp)
        theirs = PipelineParallelGrid(topology=topology)
    assert {*made} == before, "one was made again"
    assert theirs.get_slice_parallel_group() is own.tensor_group
    assert theirs.get_data_parallel_group() is own.data_group
    assert own.pipeline_group in (None, theirs.get_pipe_parallel_group())


SHARDED = (
    "attention.qkv.weight", "attention.qkv.bias", "attention.projection.weight",
    "mlp.expand.weight", "mlp.expand.bias", "mlp.contract.weight",
)  # fmt: skip


def imported_weights(group: Group, directory: Path) -> None:
    """Weights of a `transformers` GPT-2, converted by the test, give its logits under tensor parallelism."""
    saved = load_file(directory / "transformers.safetensors")
    tokens, expected = saved.pop("tokens"), saved.pop("logits")
    shape = GPT2Shape(
        layers=2, hidden=H, heads=HEADS, vocab=expected.shape[-1], padded_vocab=512, positions=tokens.shape[1]
    )
    model = FAMILY.plain(shape, group=group, init=Init(seed=0, std=0.02, layers=2, given=saved)).eval()
    with torch.no_grad():
        logits = torch.cat(gathered(model(tokens), group), -1)
    close(logits[..., : shape.vocab], expected, "logits", 1e-5)
    assert (logits[..., shape.vocab :] == float("-inf")).all()


def process_grid(grid: ProcessGrid) -> None:
    degrees = grid.tp, grid.pp, grid.dp
    for group, layout in ((grid.tensor_group, tensor_groups), (grid.data_group, data_groups)):
        (expected,) = [ranks for ranks in layout(*degrees) if grid.rank in ranks]
        assert dist.get_process_group_ranks(group) == expected, layout.__name__
    assert grid.pipeline_group is None, "one stage has nobody to talk to"
    assert (grid.tensor_group is dist.group.WORLD) == (grid.tp == dist.get_world_size())
    assert dist.get_rank(grid.tensor_group) == grid.at.tp == grid.get_model_parallel_rank()
    assert dist.get_rank(grid.data_group) == grid.at.dp == grid.get_data_parallel_rank()
    assert equal_on_all_ranks(torch.tensor(grid.at.dp), grid.tensor_group)


CHECKS = {
    "f and g": f_and_g,
    "column-parallel linear": column_parallel_linear,
    "summed while multiplying": summed_while_multiplying,
    "row-parallel linear": row_parallel_linear,
    "vocabulary rows": vocabulary_rows,
    "embedding and tied projection": embedding_and_tied_projection,
    "cross-entropy": cross_entropy,
    "cross-entropy of bf16": partial(cross_entropy, dtype=torch.bfloat16),
    "cross-entropy of large logits": partial(cross_entropy, offset=1e4),
    "attention": partial(block, Attention),
    "mlp": partial(block, MLP),
    "transformer layer": partial(block, TransformerLayer),
    "one graph": one_graph,
    "whole model": whole_model,
    "initial weights": initial_weights,
}
GRID_CHECKS = {"process grid": process_grid, "groups of a pipeline": pipeline_takes_the_groups}
