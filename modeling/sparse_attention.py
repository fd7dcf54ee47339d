"""Sparse causal attention: bands, and the fixed pattern of windows and global columns.

In a locally banded layer of GPT-3 (Brown et al., arXiv 2005.14165, section 2.1) position i sees the `window`
positions max(0, i - window + 1) .. i: the work grows with S x window, not S^2. `Fixed` says what it sees
under the fixed pattern (Child et al., arXiv 1904.10509).

`choose` takes one of four kernels for a band:

    flex_attention  GPUs: one fused kernel, compiled at first use; skips blocks off the band, has no dropout
    blocks          any device: each block of queries gets a copy of its keys and values; SDPA gets a mask
    dense mask      SDPA over all S x S scores: where the sequence is short or the window covers most of it
    causal          SDPA without a mask: where the window covers all of the sequence

and for the fixed pattern this last one, or

    windows         any device: each window gets a copy of its keys and of the columns before it; SDPA gets
                    a mask that serves all heads. flex_attention would save little: each of its blocks of
                    keys holds columns, unless windows are longer than a block.

`choose` rests on what a kernel can compute and on what was measured on a CPU; nothing was measured on a GPU.

Shapes: B samples, N heads, S positions, D head size; n blocks of T positions; a query reaches R blocks back.
Of the fixed pattern: n windows of W positions, G columns in each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.fusing import has_gpu_compiler
from recipes.attention_patterns import Fixed, Window

Kernel = Literal["flex_attention", "blocks", "windows", "dense mask", "causal"]

SHORTEST = 256  # positions below which gathering blocks costs more than it saves, measured on a CPU
FLEX_BLOCK = 128  # positions per block of flex_attention's mask
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLEX_HEAD_SIZES = (16, 256)  # smallest and largest


class Choice(NamedTuple):
    kernel: Kernel
    why: str


def choose(
    device: str,
    dtype: torch.dtype,
    dropout: float,
    positions: int,
    window: int | Fixed,
    head_size: int,
    *,
    compiler: bool = False,
) -> Choice:
    """Return the kernel for the pattern, and the reason.

    Args:
        device: type of the device, e.g. "cpu" or "cuda".
        dropout: probability on attention weights; 0 in evaluation.
        compiler: result of `has_gpu_compiler`.
    """
    if (window.window if isinstance(window, Fixed) else window) >= positions:
        return Choice("causal", "the window covers the sequence")
    if isinstance(window, Fixed):
        return Choice("windows", "each window with the columns before it")
    if positions < SHORTEST:
        return Choice("dense mask", f"the sequence is shorter than {SHORTEST}")
    obstacle = _obstacle_to_flex(device, dtype, dropout, positions, head_size, compiler)
    if obstacle is None:
        return Choice("flex_attention", "compiled for the band")
    if 8 * keys_per_block(window) > 5 * positions:
        return Choice("dense mask", f"the window covers most of the sequence, and {obstacle}")
    return Choice("blocks", obstacle)


def computes_fewer_scores(kernel: Kernel, positions: int, window: int | Fixed) -> bool:
    """Check whether the kernel computes fewer scores (a count, not a time) than a dense causal kernel."""
    if isinstance(window, Fixed):
        keys = window.window + (-(-positions // window.window) - 1) * window.columns
        return kernel == "windows" and 2 * keys < positions
    if kernel == "flex_attention":
        return (_blocks_back(window, FLEX_BLOCK) + 1) * FLEX_BLOCK < positions
    return kernel == "blocks" and 2 * keys_per_block(window) < positions


def _obstacle_to_flex(
    device: str, dtype: torch.dtype, dropout: float, positions: int, head_size: int, compiler: bool
) -> str | None:
    """Return why flex_attention cannot compute the band, or None; reasons of every machine come first."""
    if dropout:
        dropped = f"attention weights are dropped with probability {dropout:g}"
        return f"flex_attention has no dropout, and {dropped}"
    if device == "cpu":
        return "flex_attention has no backward pass on a CPU"
    if dtype not in FLEX_DTYPES:
        return f"flex_attention has no {dtype}"
    if positions % FLEX_BLOCK:  # would be compiled again for every length that generation passes through
        return f"{positions} positions are no multiple of {FLEX_BLOCK}"
    least, most = FLEX_HEAD_SIZES
    if not least <= head_size <= most:
        return f"flex_attention takes heads of {least} to {most} dimensions"
    return None if compiler else "flex_attention needs Triton, a C compiler and Python.h"


def block_size(window: int) -> int:
    """Return T, a power of two near half the window: a larger T computes more, a smaller one copies more."""
    return min(128, max(32, 1 << (max(1, window // 2) - 1).bit_length()))


def keys_per_block(window: int) -> int:
    """Return (R + 1) T, the number of keys multiplied with every query of a block."""
    size = block_size(window)
    return (_blocks_back(window, size) + 1) * size


def _blocks_back(window: int, size: int) -> int:
    """Return R, the number of earlier blocks in a query's window."""
    return -(-(window - 1) // size)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | Fixed, dropout_p: float = 0.0, *, mask: Any = None
) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v over the pattern; all tensors are (B, N, S, D).

    Args:
        dropout_p: probability on the weights; draws from the current random stream.
        mask: flex_attention's, from `prepared_mask`; needed under torch.compile.
    """
    S, D = q.shape[-2:]
    # If torch.compile is tracing for a GPU, there is a compiler.
    compiler = q.device.type != "cpu" and (torch.compiler.is_compiling() or has_gpu_compiler())
    kernel = choose(q.device.type, q.dtype, dropout_p, S, window, D, compiler=compiler).kernel
    if kernel == "causal":
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    if isinstance(window, Fixed):
        return by_windows(q, k, v, window, dropout_p)
    if kernel == "flex_attention":
        return by_flex(q, k, v, window, mask)
    return {"blocks": by_blocks, "dense mask": by_dense_mask}[kernel](q, k, v, window, dropout_p)


def in_band(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Check whether each query sees each key; positions are broadcast against each other."""
    return (key <= query) & (key > query - window)


def in_fixed(query: Tensor, key: Tensor, pattern: Fixed, heads: int) -> Tensor:
    """Check whether each query sees each key in every head: positions (..., S, 1) and L -> (..., N, S, L)."""
    window, columns, patterns, first = pattern
    turn = (first + torch.arange(heads, device=key.device)).view(-1, 1, 1) % patterns
    query, key = query[..., None, :, :], key[..., None, :, :]
    of_columns = (window - 1 - key % window) // columns  # 0: the last of their window
    return (key <= query) & ((key // window == query // window) | (of_columns == turn))


def visible(query: Tensor, key: Tensor, window: Window, heads: int) -> Tensor:
    """Return the mask of any pattern: positions (..., S, 1) and (..., 1, L) -> (..., N or 1, S, L)."""
    if isinstance(window, Fixed):
        return in_fixed(query, key, window, heads)
    return ((key <= query) if window is None else in_band(query, key, window))[..., None, :, :]


def by_dense_mask(q: Tensor, k: Tensor, v: Tensor, window: Window, dropout_p: float = 0.0) -> Tensor:
    """Compute all S x S scores and mask those outside of the pattern: the reference."""
    position = torch.arange(q.shape[-2], device=q.device)
    mask = visible(position[:, None], position[None], window, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)


def by_blocks(q: Tensor, k: Tensor, v: Tensor, window: int, dropout_p: float = 0.0) -> Tensor:
    """Multiply each block of T queries with the keys of its own block and of R before it: S (R + 1) T scores.

    Blocks stand where SDPA expects heads, so that one mask serves all samples and heads.
    """
    B, N, S, D = q.shape
    T = block_size(window)
    n, R = -(-S // T), _blocks_back(window, T)
    after = n * T - S  # padding, which no query before it sees

    def reaching_back(x: Tensor) -> Tensor:  # (B, N, S, D) -> (B N, n, (R + 1) T, D)
        x = F.pad(x, (0, 0, R * T, after)).reshape(B * N, R + n, T, D)
        return torch.cat([x[:, i : i + n] for i in range(R + 1)], 2)

    queries = F.pad(q, (0, 0, 0, after)).reshape(B * N, n, T, D)
    query = torch.arange(n * T, device=q.device).view(n, T, 1)
    key = query[:, :1] + torch.arange(-R * T, T, device=q.device)  # (n, 1, (R + 1) T)
    mask = in_band(query, key, window) & (key >= 0)  # before the first position there is padding only
    keys, values = reaching_back(k), reaching_back(v)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask[None], dropout_p=dropout_p)
    return out.view(B, N, n * T, D)[:, :, :S]


def by_windows(q: Tensor, k: Tensor, v: Tensor, pattern: Fixed, dropout_p: float = 0.0) -> Tensor:
    """Multiply each window of queries with its own keys and the columns before it: S (W + (n - 1) G) scores.

    Keys and values are copied 1 + (n - 1) G / W times; heads choose their columns, and share the mask.
    """
    B, N, S, D = q.shape
    W, G, patterns, first = pattern
    n = -(-S // W)
    number = torch.arange(n, device=q.device)
    turn = (first + torch.arange(N, device=q.device)) % patterns
    columns = W - G * (turn + 1)[:, None] + torch.arange(G, device=q.device)  # (N, G), places in a window
    places = columns.view(1, N, 1, G, 1).expand(B, N, n - 1, G, D)

    def with_columns(x: Tensor) -> Tensor:  # (B, N, n, W, D) -> (B N, n, W + (n - 1) G, D)
        chosen = x[:, :, :-1].gather(3, places).view(B, N, 1, (n - 1) * G, D)
        return torch.cat([x, chosen.expand(B, N, n, -1, D)], 3).flatten(0, 1)

    queries, keys, values = (F.pad(x, (0, 0, 0, n * W - S)).reshape(B, N, n, W, D) for x in (q, k, v))
    own = torch.ones(W, W, dtype=torch.bool, device=q.device).tril().expand(n, W, W)
    before = (number[:-1].repeat_interleave(G) < number[:, None])[:, None].expand(n, W, -1)
    mask = torch.cat([own, before], -1)  # (n, W, W + (n - 1) G)
    keys, values = with_columns(keys), with_columns(values)
    out = F.scaled_dot_product_attention(queries.flatten(0, 1), keys, values, mask[None], dropout_p)
    return out.view(B, N, n * W, D)[:, :, :S]


def by_flex(q: Tensor, k: Tensor, v: Tensor, window: int, mask: Any = None) -> Tensor:
    """Compute the band in one fused kernel; a `mask` for another length is replaced."""
    from torch.nn.attention.flex_attention import flex_attention

    S = q.shape[-2]
    if mask is None or mask.seq_lengths != (S, S):
        mask = block_mask(S, window, q.device)
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, block_mask=mask)
    return compiled_flex()(q, k, v, block_mask=mask)


@functools.cache
def compiled_flex() -> Callable[..., Any]:
    """Compile flex_attention to one fused kernel, once."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def prepared_mask(
    device: torch.device, dtype: torch.dtype, positions: int, window: int | Fixed, head_size: int
) -> Any:
    """Return flex_attention's mask, or None if `choose` takes another kernel; for layers without dropout.

    A layer needs it before torch.compile traces it: `block_mask` cannot be traced and would break the graph.
    """
    compiler = device.type != "cpu" and has_gpu_compiler()
    chosen = choose(device.type, dtype, 0.0, positions, window, head_size, compiler=compiler)
    if isinstance(window, Fixed) or chosen.kernel != "flex_attention":
        return None
    return block_mask(positions, window, device)


# Dynamo ignores lru_cache: traced, the comparisons would be in the graph and run in every call.
@torch.compiler.disable
@functools.lru_cache(maxsize=16)
def block_mask(positions: int, window: int, device: torch.device) -> Any:
    """Return the blocks of keys for each block of queries; cached, since it compares S x S positions."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return in_band(query, key, window)

    return create_block_mask(visible, None, None, positions, positions, device=device, BLOCK_SIZE=FLEX_BLOCK)
