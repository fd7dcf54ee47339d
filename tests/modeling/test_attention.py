"""The blocks of dense attention against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from modeling import attention as core
from modeling.attention import QUERIES

LONG = QUERIES + 44  # two blocks, the second one shorter


def draw(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def defined(q, k, v, causal, mask, kept):
    """By the definition, with the weights that `kept` leaves."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~below, -torch.inf)
    return (torch.softmax(scores, -1) * kept) @ v


@pytest.mark.parametrize(
    ("kind", "dropout", "how"),
    [
        *((kind, dropout, "eager") for kind in ("causal", "padded", "whole") for dropout in (0.0, 0.25)),
        ("causal", 0.25, "compiled"),
        pytest.param("padded", 0.0, "compiled", marks=pytest.mark.ci),
    ],
)
def test_output_and_gradients_are_those_of_the_definition(kind, dropout, how):
    causal, lengths = kind == "causal", torch.tensor([LONG, 130])
    mask = (torch.arange(LONG) < lengths[:, None])[:, None, None] if kind == "padded" else None
    q, k, v = (draw(2, 3, LONG, 32, seed=i).requires_grad_() for i in range(3))
    incoming = draw(2, 3, LONG, 32, seed=3)
    rows = core.dropout_rows(q) if dropout else None

    def blocks(q, k, v):
        return core._Blocks.apply(q, k, v, mask, rows, causal, dropout)

    run = blocks if how == "eager" else torch.compile(blocks, fullgraph=True, backend="aot_eager")
    found = run(q, k, v)
    gradients = torch.autograd.grad(found, (q, k, v), incoming)

    kept = core._keep_mask(rows, LONG, dropout) / (1 - dropout) if rows is not None else 1.0
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = defined(*exact, causal, mask, kept)
    wanted = torch.autograd.grad(expected, exact, incoming.double())
    for name, a, b in zip(("output", "q", "k", "v"), (found, *gradients), (expected, *wanted), strict=True):
        error = float(((a.double() - b).norm() / b.norm()).detach())
        assert error < 6e-3, f"{name} is off by {error:.2g}"  # up to 5.4e-3: bf16 has 8 bits


def test_compiled_the_backward_pass_keeps_no_weights_in_fp32():
    q, k, v = (draw(2, 3, 64, 8, seed=i).requires_grad_() for i in range(3))
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    def two_layers(q, k, v):
        q = core.attention(q, k, v, causal=True)
        return core.attention(torch.tanh(q), k, v, causal=True)

    run = torch.compile(two_layers, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run(q, k, v)
    weights = [x.dtype for x in kept if x.shape[-2:] == (64, 64) and x.is_floating_point()]
    assert weights == [torch.bfloat16] * 2, f"kept of all weights: {weights}"


def test_each_weight_is_dropped_with_the_probability_and_apart_from_the_others():
    torch.manual_seed(0)
    rows = core.dropout_rows(torch.empty(4, 4, 512, 8))
    kept = core._keep_mask(rows, 512, 0.1).double()
    assert abs(kept.mean() - 0.9) < 1e-3
    along_keys, along_queries = kept.mean((0, 1, 2)), kept.mean((0, 1, 3))
    for line in (along_keys, along_queries):  # of 8192 weights: 3.3e-3 of standard deviation
        assert (line - 0.9).abs().max() < 0.02
    flat = kept.view(-1, 512) - 0.9
    together = flat.T @ flat / len(flat) / 0.09 - torch.eye(512, dtype=torch.float64)
    assert together.abs().max() < 0.15, "two keys are dropped together"  # 0.011 of standard deviation
    heads = kept.transpose(0, 1).reshape(4, -1) - 0.9
    assert (heads @ heads.T / heads.shape[1] / 0.09 - torch.eye(4, dtype=torch.float64)).abs().max() < 0.01


def test_a_seed_decides_what_is_dropped_compiled_or_not():
    q, k, v = (draw(1, 2, 40, 32, seed=i).requires_grad_() for i in range(3))

    def run(compute):
        torch.manual_seed(7)
        return compute(q, k, v, causal=True, dropout_p=0.5)

    compiled = torch.compile(core.attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(run(core.attention), run(compiled))
    assert not torch.equal(run(core.attention), core.attention(q, k, v, causal=True, dropout_p=0.5))


def test_the_kernel_follows_device_precision_length_and_compiler():
    assert core.choose("cuda", torch.bfloat16, 0.1, 256, True) == "sdpa"
    assert core.choose("cpu", torch.float32, 0.0, 256, True) == "sdpa"
    assert core.choose("cpu", torch.bfloat16, 0.0, 256, True) == "blocks"
    assert core.choose("cpu", torch.bfloat16, 0.0, 256, False) == "sdpa"
    assert core.choose("cpu", torch.bfloat16, 0.0, 4096, True) == "sdpa"
    assert core.choose("cpu", torch.bfloat16, 0.1, 4096, False) == "blocks"
