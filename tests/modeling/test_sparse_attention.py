"""Kernels of sparse attention against a loop over positions, and which one is chosen.

Models of sparse layers: test_banded_models.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from modeling import sparse_attention as band
from recipes.families import Fixed

KERNELS = {"dense mask": band.by_dense_mask, "chosen": band.sparse_attention}
SIZES = [  # positions, window, head size
    (1, 1, 3), (7, 3, 5), (65, 1, 8), (97, 33, 4), (129, 64, 7), (130, 129, 8), (130, 130, 8), (130, 500, 8),
    (261, 40, 6), (300, 101, 1),
]  # fmt: skip


def by_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """The definition, one position after the other."""
    out = []
    for i in range(q.shape[2]):
        seen = slice(max(0, i - window + 1), i + 1)
        scores = (q[:, :, i, None] * k[:, :, seen]).sum(-1) / math.sqrt(q.shape[3])
        out.append((scores.softmax(-1)[..., None] * v[:, :, seen]).sum(2))
    return torch.stack(out, 2)


def tensors(
    positions: int, head_size: int, *, dtype: torch.dtype = torch.float64, grad: bool = True
) -> list[torch.Tensor]:
    """q, k and v of two samples and three heads, strided as a layer hands them over."""
    generator = torch.Generator().manual_seed(positions)
    qkv = 2 * torch.randn(2, positions, 3, 3, head_size, generator=generator, dtype=torch.float64).to(dtype)
    return [x.detach().requires_grad_(grad) for x in qkv.permute(3, 0, 2, 1, 4).unbind(0)]


def check_kernel(kernel, positions: int, window: int, head_size: int) -> None:
    """Output and the gradients of q, k and v are those of the loop."""
    inputs = tensors(positions, head_size)
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for function in (kernel, by_loop):
        out = function(*inputs, window)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, cotangent)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("positions", "window", "head_size"), SIZES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_is_the_loop(name, positions, window, head_size):
    check_kernel(KERNELS[name], positions, window, head_size)


BREAKS = {
    "one too wide": lambda query, key, window: (key <= query) & (key >= query - window),
    "one too narrow": lambda query, key, window: (
        (key <= query) & ((key > query - window + 1) | (key == query))
    ),
    "looks ahead": lambda query, key, window: (key <= query + 1) & (key > query - window),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_broken_band_is_noticed(how, monkeypatch):
    monkeypatch.setattr(band, "in_band", BREAKS[how])
    with pytest.raises(AssertionError, match="not close"):
        check_kernel(band.by_dense_mask, 97, 33, 4)


@pytest.mark.parametrize(
    ("positions", "window"), [(256, 1), (384, 200), (512, Fixed(128, 16, 2, first=1)), (768, Fixed(384, 8))]
)
def test_mask_of_flex_attention(positions, window, monkeypatch):
    """What is compiled for a GPU, run uncompiled: it has a forward pass on a CPU."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(band, "compiled_flex", lambda: flex_attention.flex_attention)
    inputs = tensors(positions, 16, dtype=torch.float32, grad=False)
    torch.testing.assert_close(
        band.by_flex(*inputs, window), band.by_dense_mask(*inputs, window), rtol=1e-5, atol=1e-5
    )
    mask = band.block_mask(positions, window, 3, torch.device("cpu"))
    visited = int(mask.kv_num_blocks[0, 0].sum())
    blocks = positions // band.FLEX_BLOCK
    dense = blocks * (blocks + 1) // 2
    fewer = band.computes_fewer_scores("flex_attention", positions, window)
    assert (visited < dense) == fewer, "blocks that nobody sees must be skipped, or nothing is gained"


def test_dropout_drops_weights():
    """Of the band alone, with the right mean, and anew in every call."""
    torch.manual_seed(0)
    q, k, v = tensors(300, 4, dtype=torch.float32, grad=False)
    found = torch.stack([band.by_dense_mask(q, k, torch.ones_like(v), 40, 0.25) for _ in range(20)])
    assert float(found.mean()) == pytest.approx(1, abs=0.01) and not torch.equal(found[0], found[1])
    first = found[:, :, :, 0].unique()  # position 0 sees itself alone: all or nothing
    assert first.tolist() == pytest.approx([0, 4 / 3])


CASES = [  # device, dtype, dropout, positions, window, head size, compiler -> kernel
    ("cpu", torch.float32, 0.0, 1024, 1024, 64, False, "causal"),
    ("cpu", torch.float32, 0.0, 255, 16, 64, False, "dense mask"),
    ("cpu", torch.float32, 0.0, 1024, 64, 64, False, "dense mask"),
    ("cpu", torch.bfloat16, 0.1, 1000, 64, 64, True, "dense mask"),
    ("cpu", torch.float32, 0.0, 1024, 700, 64, False, "dense mask"),
    ("cuda", torch.bfloat16, 0.0, 1024, 64, 64, True, "flex_attention"),
    ("cuda", torch.float16, 0.0, 1024, 1000, 80, True, "flex_attention"),
    ("cuda", torch.bfloat16, 0.1, 1024, 64, 64, True, "dense mask"),
    ("cuda", torch.bfloat16, 0.1, 1024, 1000, 64, True, "dense mask"),
    ("cuda", torch.bfloat16, 0.0, 1000, 64, 64, True, "dense mask"),
    ("cuda", torch.float64, 0.0, 1024, 64, 64, True, "dense mask"),
    ("cuda", torch.bfloat16, 0.0, 1024, 64, 8, True, "dense mask"),
    ("cuda", torch.bfloat16, 0.0, 1024, 64, 64, False, "dense mask"),
    ("xpu", torch.bfloat16, 0.0, 1024, 64, 64, True, "flex_attention"),
]


@pytest.mark.parametrize("case", CASES)
def test_choice(case):
    *facts, compiler, kernel = case
    found = band.choose(*facts, compiler=compiler)
    assert found.kernel == kernel and found.why
    dropout = facts[2]
    assert ("dropped with probability 0.1" in found.why) == bool(dropout)


def test_the_chosen_kernel_runs(monkeypatch):
    """The choice for the tensors at hand, dropout among it, and no other."""
    ran, asked, choose = [], [], band.choose
    monkeypatch.setattr(band, "choose", lambda *args, **more: asked.append(args) or choose(*args, **more))
    monkeypatch.setattr(band, "by_dense_mask", lambda *args: ran.append(args[3:]) or args[0])
    for positions, window in ((300, 20), (100, 20), (100, 100)):
        band.sparse_attention(*tensors(positions, 4, grad=False), window, 0.1)
    assert ran == [(20, 0.1), (20, 0.1)]
    assert asked[0] == ("cpu", torch.float64, 0.1, 300, 20, 4)


@pytest.mark.parametrize(
    ("kernel", "positions", "window", "fewer"),
    [
        ("dense mask", 256, 16, False),
        ("causal", 256, 256, False), ("flex_attention", 1024, 64, True),
        ("flex_attention", 1024, 769, True), ("flex_attention", 1024, 770, False),
    ],
)  # fmt: skip
def test_scores_are_counted(kernel, positions, window, fewer):
    assert band.computes_fewer_scores(kernel, positions, window) == fewer


# The fixed pattern

FIXED = [  # positions, pattern
    (40, Fixed(8, 2)), (37, Fixed(8, 2)), (47, Fixed(8, 2, 4)), (33, Fixed(8, 3, 2, first=1)),
    (12, Fixed(11, 5, 2)), (300, Fixed(128, 16, 8, first=5)), (20, Fixed(3, 1, 3)), (9, Fixed(9, 2)),
    (1, Fixed(4, 1)),
]  # fmt: skip


def their_layout(positions: int, pattern: Fixed, heads: int) -> torch.Tensor:
    """DeepSpeed's FixedSparsityConfig as documented, block by block, and causal: (N, S, S)."""
    window, block, patterns, first = pattern
    local, blocks = window // block, -(-positions // block)
    seen = torch.zeros(heads, blocks * block, blocks * block, dtype=torch.bool)
    for head in range(heads):
        for row in range(blocks):
            for column in range(blocks):
                of_window = local - 1 - (first + head) % patterns
                if row // local == column // local or column % local == of_window:
                    seen[head, row * block : (row + 1) * block, column * block : (column + 1) * block] = True
    return seen[:, :positions, :positions].tril()


@pytest.mark.parametrize(("positions", "pattern"), FIXED, ids=str)
def test_a_fixed_pattern_is_dense_attention_under_its_mask(positions, pattern):
    """Output and gradients of the kernel, and of an explicit mask."""
    inputs = tensors(positions, 4)
    N, position = inputs[0].shape[1], torch.arange(positions)
    mask = band.visible(position[:, None], position[None], pattern, N)
    if pattern.window % pattern.columns == 0:
        assert torch.equal(mask, their_layout(positions, pattern, N))
    cotangent, results = torch.randn(inputs[0].shape, dtype=torch.float64), []
    scores = (inputs[0] @ inputs[1].mT / 2).masked_fill(~mask, -torch.inf)
    for out in (scores.softmax(-1) @ inputs[2], band.sparse_attention(*inputs, pattern)):
        results.append([out.detach(), *torch.autograd.grad(out, inputs, cotangent, retain_graph=True)])
    for found in results[1:]:
        for ours, expected in zip(found, results[0], strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


def test_kernel_of_a_fixed_pattern():
    sizes = ("cuda", torch.bfloat16, 0.0, 2048)
    assert band.choose(*sizes, Fixed(128, 16, 8), 64, compiler=True).kernel == "flex_attention"
    assert band.choose(*sizes, Fixed(2048, 16, 8), 64, compiler=True).kernel == "causal"
    assert band.prepared_mask(torch.device("cpu"), torch.float32, 2048, Fixed(128, 16), 3, 64) is None
