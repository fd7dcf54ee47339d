"""Sparse causal attention: bands, and the fixed pattern of windows and global columns.

In a locally banded layer of GPT-3 (Brown et al., arXiv 2005.14165, section 2.1) position i sees the `window`
positions max(0, i - window + 1) .. i. `Fixed` says what it sees under the fixed pattern (Child et al., arXiv
1904.10509). Each pattern is one mask function, and `choose` takes one of three kernels for it:

    flex_attention  GPUs: one fused kernel, compiled at first use; skips blocks of keys that no query sees
    dense mask      any device: SDPA over all S x S scores with the pattern as its mask
    causal          any device: SDPA without a mask, where the window covers all of the sequence

Shapes: B samples, N heads, S positions, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.fusing import has_gpu_compiler
from recipes.families import Fixed, Window

Kernel = Literal["flex_attention", "dense mask", "causal"]

FLEX_BLOCK = 128  # positions per block of flex_attention's mask
FLEX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLEX_HEAD_SIZES = (16, 256)  # smallest and largest


class KernelChoice(NamedTuple):
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
) -> KernelChoice:
    """Return the kernel for the pattern, and the reason.

    Args:
        device: type of the device, e.g. "cpu" or "cuda".
        dropout: probability on attention weights; 0 in evaluation.
        compiler: result of `has_gpu_compiler`.
    """
    width = window.window if isinstance(window, Fixed) else window
    if width >= positions:
        return KernelChoice("causal", "the window covers the sequence")
    obstacle = _obstacle_to_flex(device, dtype, dropout, positions, head_size, compiler)
    if obstacle is not None:
        return KernelChoice("dense mask", obstacle)
    return KernelChoice("flex_attention", "compiled for the pattern")


def computes_fewer_scores(kernel: Kernel, positions: int, window: int | Fixed) -> bool:
    """Check whether the kernel computes fewer scores (a count, not a time) than a dense causal kernel.

    Windows of the fixed pattern have columns in each, so that a block of keys is skipped only within longer
    ones.
    """
    if kernel != "flex_attention":
        return False
    if isinstance(window, Fixed):
        return window.window > 2 * FLEX_BLOCK
    blocks_back = -(-(window - 1) // FLEX_BLOCK)
    return (blocks_back + 1) * FLEX_BLOCK < positions


def _obstacle_to_flex(
    device: str,
    dtype: torch.dtype,
    dropout: float,
    positions: int,
    head_size: int,
    compiler: bool,
) -> str | None:
    """Return why flex_attention cannot compute the pattern, or None; reasons of every machine come first."""
    if dropout:
        dropped = f"attention weights are dropped with probability {dropout:g}"
        return f"flex_attention has no dropout, and {dropped}"
    if device == "cpu":
        return "flex_attention has no backward pass on a CPU"
    if dtype not in FLEX_DTYPES:
        return f"flex_attention has no {dtype}"
    # would be compiled again for every length that generation passes through
    if positions % FLEX_BLOCK:
        return f"{positions} positions are no multiple of {FLEX_BLOCK}"
    least, most = FLEX_HEAD_SIZES
    if not least <= head_size <= most:
        return f"flex_attention takes heads of {least} to {most} dimensions"
    return (
        None if compiler else "flex_attention needs Triton, a C compiler and Python.h"
    )


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | Fixed,
    dropout_p: float = 0.0,
    *,
    mask: Any = None,
) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v over the pattern; all tensors are (B, N, S, D).

    Args:
        dropout_p: probability on the weights; draws from the current random stream.
        mask: flex_attention's, from `prepared_mask`; needed under torch.compile.
    """
    positions, head_size = q.shape[-2:]
    device = q.device.type
    # If torch.compile is tracing for a GPU, there is a compiler.
    compiler = device != "cpu" and (torch.compiler.is_compiling() or has_gpu_compiler())
    kernel = choose(
        device, q.dtype, dropout_p, positions, window, head_size, compiler=compiler
    ).kernel
    if kernel == "causal":
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout_p, is_causal=True
        )
    if kernel == "flex_attention":
        return by_flex(q, k, v, window, mask)
    return by_dense_mask(q, k, v, window, dropout_p)


def in_band(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Check whether each query sees each key; positions are broadcast against each other."""
    return (key <= query) & (key > query - window)


def in_fixed(query: Tensor, key: Tensor, head: Tensor, pattern: Fixed) -> Tensor:
    """Check whether each query sees each key in each head; all three are broadcast against each other."""
    window, columns, patterns, first = pattern
    turn = (first + head) % patterns
    of_columns = (window - 1 - key % window) // columns  # 0: the last of their window
    return (key <= query) & ((key // window == query // window) | (of_columns == turn))


def visible(query: Tensor, key: Tensor, window: Window, heads: int) -> Tensor:
    """Return the mask of any pattern: positions (..., S, 1) and (..., 1, L) -> (..., N or 1, S, L)."""
    query = query[..., None, :, :]
    key = key[..., None, :, :]
    if isinstance(window, Fixed):
        head = torch.arange(heads, device=key.device).view(-1, 1, 1)
        return in_fixed(query, key, head, window)
    return (key <= query) if window is None else in_band(query, key, window)


def by_dense_mask(
    q: Tensor, k: Tensor, v: Tensor, window: Window, dropout_p: float = 0.0
) -> Tensor:
    """Compute all S x S scores and mask those outside of the pattern."""
    position = torch.arange(q.shape[-2], device=q.device)
    mask = visible(position[:, None], position[None], window, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)


def by_flex(
    q: Tensor, k: Tensor, v: Tensor, window: int | Fixed, mask: Any = None
) -> Tensor:
    """Compute the pattern in one fused kernel; a `mask` for another length is replaced."""
    from torch.nn.attention.flex_attention import flex_attention

    heads, positions = q.shape[1:3]
    if mask is None or mask.seq_lengths != (positions, positions):
        mask = block_mask(positions, window, heads, q.device)
    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, block_mask=mask)
    return compiled_flex()(q, k, v, block_mask=mask)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """Compile flex_attention to one fused kernel, once."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def prepared_mask(
    device: torch.device,
    dtype: torch.dtype,
    positions: int,
    window: int | Fixed,
    heads: int,
    head_size: int,
) -> Any:
    """Return flex_attention's mask, or None if `choose` takes another kernel; for layers without dropout.

    A layer needs it before torch.compile traces it: `block_mask` cannot be traced and would break the graph.
    """
    compiler = device.type != "cpu" and has_gpu_compiler()
    chosen = choose(
        device.type, dtype, 0.0, positions, window, head_size, compiler=compiler
    )
    if chosen.kernel != "flex_attention":
        return None
    return block_mask(positions, window, heads, device)


# Dynamo ignores lru_cache: traced, the comparisons would be in the graph and run in every call.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
@functools.lru_cache(maxsize=16)
def block_mask(
    positions: int, window: int | Fixed, heads: int, device: torch.device
) -> Any:
    """Return the blocks of keys for each block of queries; cached, since it compares S x S positions."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if isinstance(window, Fixed):
            return in_fixed(query, key, head, window)
        return in_band(query, key, window)

    differing_heads = heads if isinstance(window, Fixed) else None
    where: dict[str, Any] = dict(device=device, BLOCK_SIZE=FLEX_BLOCK)
    return create_block_mask(seen, None, differing_heads, positions, positions, **where)
