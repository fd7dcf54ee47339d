"""Checks of dropout, of its random streams in attention, and of recomputation. Run by modeling_checks.py."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch
from comparing import Group, equal_on_all_ranks, gathered

from modeling import transformer
from modeling.gpt2 import FAMILY, GPT2Shape
from modeling.hidden_dropout import dropout_seeds_of
from modeling.initialization import Init
from modeling.layer_list import Stack
from modeling.parallel.layers import seed_step, tensor_parallel_random
from modeling.parallel.process_grid import ProcessGrid

SEED = 11
SHAPE = GPT2Shape(
    layers=3, hidden=32, heads=4, vocab=10, padded_vocab=16, positions=8,
    hidden_dropout=0.2, attention_dropout=0.2,
)  # fmt: skip


def outside(grid: ProcessGrid, step: int = 3) -> torch.Tensor:
    seed_step(SEED, step, grid.at)
    return torch.rand(64)


def inside(grid: ProcessGrid, step: int = 3) -> torch.Tensor:
    seed_step(SEED, step, grid.at)
    with tensor_parallel_random(True):
        return torch.rand(64)


def outside_draws_equal(grid: ProcessGrid) -> None:
    draws = gathered(outside(grid), grid.tensor_group)
    assert all(torch.equal(d, draws[0]) for d in draws), "tensor ranks must draw the same outside of regions"


def draws_differ_over_data_ranks(grid: ProcessGrid) -> None:
    for draw in (outside, inside):
        assert all_differ(gathered(draw(grid), grid.data_group)), "data ranks need masks of their own"


def inside_masks_differ(grid: ProcessGrid) -> None:
    assert all_differ(gathered(inside(grid), grid.tensor_group)), (
        "tensor ranks hold different heads: each must draw its own"
    )


def streams_apart(grid: ProcessGrid) -> None:
    """Drawing inside does not move the stream outside, and each goes on where it was."""
    seed_step(SEED, 3, grid.at)
    first, second = torch.rand(8), torch.rand(8)
    seed_step(SEED, 3, grid.at)
    again = torch.rand(8)
    draws = []
    for _ in range(2):
        with tensor_parallel_random(True):
            draws.append(torch.rand(8))
    assert torch.equal(first, again) and torch.equal(second, torch.rand(8))
    assert all_differ([first, second, *draws])
    seed_step(SEED, 3, grid.at)
    with tensor_parallel_random(False):
        assert torch.equal(torch.rand(8), first)


def reseeded_step_repeats(grid: ProcessGrid) -> None:
    for draw in (outside, inside):
        assert torch.equal(draw(grid, 3), draw(grid, 3)) and not torch.equal(draw(grid, 3), draw(grid, 4))


def model(shape: GPT2Shape, group: Group) -> Stack:
    return FAMILY.plain(shape, group=group, init=Init(seed=2, std=0.3, layers=shape.layers))


def batch(shape: GPT2Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.arange(2 * shape.positions).view(2, -1)
    return tokens % shape.vocab, tokens * 3 % shape.vocab, torch.full(tokens.shape, 1 / tokens.numel())


def dropout_seeds(shape: GPT2Shape) -> torch.Tensor:
    return dropout_seeds_of(SEED, 3, torch.arange(2), shape.positions)


def loss_and_gradients(
    grid: ProcessGrid, shape: GPT2Shape, group: Group
) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """One training pass, reseeded; the third counts layers' forward passes, recomputed ones included."""
    used, passes = model(shape, group), 0

    def count(*_) -> None:
        nonlocal passes
        passes += 1

    for layer in used.layers:
        layer.register_forward_hook(count)
    seed_step(SEED, 3, grid.at)
    loss = used(*batch(shape), dropout_seeds=dropout_seeds(shape))
    loss.backward()
    return loss.detach(), [p.grad for p in used.parameters()], passes


def model_draws_inside_and_outside(grid: ProcessGrid) -> None:
    """Inside attention tensor ranks draw differently; the residual stream stays equal on them."""
    drawn, streams = [], []
    attention = transformer.F.scaled_dot_product_attention

    def recorded(*args, dropout_p, **kwargs):
        state = torch.get_rng_state()
        drawn.append(torch.rand(64))
        torch.set_rng_state(state)
        assert dropout_p == SHAPE.attention_dropout
        return attention(*args, dropout_p=dropout_p, **kwargs)

    used = model(SHAPE, grid.tensor_group)
    used.final_norm.register_forward_hook(lambda module, args, output: streams.append(output.detach()))
    seed_step(SEED, 3, grid.at)
    with mock.patch.object(transformer.F, "scaled_dot_product_attention", recorded), torch.no_grad():
        used(batch(SHAPE)[0], dropout_seeds=dropout_seeds(SHAPE))
    by_layer = [gathered(d, grid.tensor_group) for d in drawn]
    equal = equal_on_all_ranks(streams[0], grid.tensor_group)
    assert len(by_layer) == SHAPE.layers
    assert all_differ([draw for layer in by_layer for draw in layer]), (
        "each rank and layer must draw its own attention dropout"
    )
    assert equal, "the residual stream differs over the tensor ranks"


def hidden_dropout_as_dense(grid: ProcessGrid) -> None:
    """Without attention dropout a dense model drops the same."""
    shape = replace(SHAPE, attention_dropout=0.0)
    cut = loss_and_gradients(grid, shape, grid.tensor_group)[0]
    dense = loss_and_gradients(grid, shape, None)[0]
    without = loss_and_gradients(grid, replace(shape, hidden_dropout=0.0), None)[0]
    assert abs(cut - dense) < 1e-5 and abs(dense - without) > 1e-3


def no_dropout_in_evaluation(grid: ProcessGrid) -> None:
    evaluated = model(SHAPE, grid.tensor_group).eval()
    plain = model(replace(SHAPE, hidden_dropout=0.0, attention_dropout=0.0), grid.tensor_group)
    with torch.no_grad():
        found, expected = (m(*batch(SHAPE)) for m in (evaluated, plain))
    assert torch.equal(found, expected)


def recomputation_is_exact(grid: ProcessGrid) -> None:
    """Same loss and gradients, bit for bit, with dropout; every layer does run twice."""
    for group in (None, grid.tensor_group):
        loss, gradients, passes = loss_and_gradients(grid, SHAPE, group)
        assert passes == SHAPE.layers
        for interval in (1, 2, SHAPE.layers):
            again, regained, recomputed = loss_and_gradients(
                grid, replace(SHAPE, checkpoint_interval=interval), group
            )
            assert torch.equal(loss, again), f"loss with chunks of {interval}"
            different = [
                i for i, pair in enumerate(zip(gradients, regained, strict=True)) if not torch.equal(*pair)
            ]
            assert not different, f"gradients {different} with chunks of {interval} layers, group {group}"
            assert recomputed == 2 * SHAPE.layers, f"{recomputed} passes of layers with chunks of {interval}"


def recomputed_attention_is_exact(grid: ProcessGrid) -> None:
    """Same loss and gradients, bit for bit, with its dropout; nothing else does run twice."""
    core = transformer.Attention._core
    for group in (None, grid.tensor_group):
        loss, gradients, passes = loss_and_gradients(grid, SHAPE, group)
        with mock.patch.object(transformer.Attention, "_core", autospec=True, side_effect=core) as called:
            again, regained, same = loss_and_gradients(grid, replace(SHAPE, recomputes_core=True), group)
        assert torch.equal(loss, again) and passes == same == SHAPE.layers
        assert all(torch.equal(*pair) for pair in zip(gradients, regained, strict=True)), f"group {group}"
        assert called.call_count == 2 * SHAPE.layers
    kept, left = (saved_bytes(grid, 0, recomputes_core=again) for again in (False, True))
    heads = SHAPE.heads // grid.tp
    scores = 4 * SHAPE.layers * 2 * heads * SHAPE.positions**2  # of two samples, in fp32
    assert left <= kept - scores, f"{left} of {kept} bytes, of which the scores are {scores}"


def recomputed_layers_keep_nothing(grid: ProcessGrid) -> None:
    """What the layers hold for the backward pass is gone, besides their inputs, which DeepSpeed holds."""
    kept = saved_bytes(grid, 0)
    for interval in (1, SHAPE.layers):
        left = saved_bytes(grid, interval)
        assert left < kept / 4, f"{left} of {kept} bytes with chunks of {interval}"


def saved_bytes(grid: ProcessGrid, interval: int, recomputes_core: bool = False) -> int:
    """Bytes that autograd holds after the forward pass, parameters left out."""
    shape = replace(SHAPE, checkpoint_interval=interval, recomputes_core=recomputes_core)
    used = model(shape, grid.tensor_group)
    parameters = {p.untyped_storage().data_ptr() for p in used.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    seed_step(SEED, 3, grid.at)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = used(*batch(SHAPE), dropout_seeds=dropout_seeds(SHAPE))
    held = sum(size for pointer, size in storages.items() if pointer not in parameters)
    loss.backward()
    return held


def all_differ(tensors: list[torch.Tensor]) -> bool:
    return not any(torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])


CHECKS = {
    "draws outside are equal on tensor ranks": outside_draws_equal,
    "draws inside differ on tensor ranks": inside_masks_differ,
    "the streams do not disturb each other": streams_apart,
    "a reseeded step repeats its draws": reseeded_step_repeats,
    "the model draws inside and outside": model_draws_inside_and_outside,
    "hidden dropout is that of the dense model": hidden_dropout_as_dense,
    "no dropout in evaluation": no_dropout_in_evaluation,
    "recomputation is exact": recomputation_is_exact,
    "recomputed layers keep nothing": recomputed_layers_keep_nothing,
    "recomputed attention is exact": recomputed_attention_is_exact,
}
DATA_PARALLEL_CHECKS = {"draws differ over data ranks": draws_differ_over_data_ranks}
