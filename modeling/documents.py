"""Documents within a sample that do not see each other, and positions that begin anew with each.

The stream of a GPT-2 with borders is (tokens, row, *seeds) -> (x, row, *seeds) -> logits. The row is a
`PackedRow`, made by the host once for all layers: a number of documents that only a device knew would be
waited for. Its places (B, S) say where each token is in its document; 0 is a border. None: a sample is one
document.

No mask is made: on a CPU each document is attended to by itself, on GPUs by FlashAttention for samples of
different lengths. GPUs without it, and attention dropout on a CPU, take one call for each document.

Shapes: B samples, S positions, T = B x S tokens, N heads of this rank, D their size.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modeling.attention import heads_first, self_attention
from modeling.parallel.collectives import own_positions
from modeling.parallel.process_grid import Group
from modeling.unpadding import PackedRow, has_varlen, varlen_attention

Apply = Callable[[Any, Any], Any]  # (layer, stream) -> stream
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def row_of_documents(places: Tensor, device: torch.device | str) -> PackedRow:
    """Return the row of the documents in B samples, on `device`; its `places` stay (B, S)."""
    begins = (places.flatten() == 0).nonzero().flatten()
    offsets = F.pad(begins, (0, 1), value=places.numel()).int()
    # if a model is compiled: one graph for all numbers of documents
    if "torch._dynamo" in sys.modules:
        torch._dynamo.maybe_mark_dynamic(offsets, 0)
    row = PackedRow(places, offsets, places.shape[1], on_host=offsets)
    return row.to(device, non_blocking=True)


def applied(within: bool, restarts: bool, cut_over: Group) -> tuple[Apply, Apply]:
    """Return what the position layer and the transformer layers of a GPT-2 do to the stream.

    `within`: layers attend within documents; `restarts`: positions begin anew with each.
    """
    add_positions = partial(_add_positions, cut_over, restarts)
    return add_positions, partial(_attend, within)


def _add_positions(
    cut_over: Group, restarts: bool, layer: nn.Module, stream: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Add positions to the stream, those of its row if it `restarts` them; cut its seeds."""
    x, row, *dropout_seeds = stream
    own_seeds = [own_positions(each, cut_over) for each in dropout_seeds]
    places = None
    if restarts and row is not None:
        places = own_positions(row.places, cut_over)
    return layer(x, *own_seeds, places=places), row, *own_seeds


def _attend(within: bool, layer: nn.Module, stream: tuple[Any, ...]) -> tuple[Any, ...]:
    """Apply a transformer layer that attends `within` documents, or to windows."""
    x, row, *dropout_seeds = stream
    return layer(x, row if within else None, *dropout_seeds), row, *dropout_seeds


def attention_within_documents(
    qkv: Tensor, row: PackedRow | None, dropout: float
) -> Tensor:
    """Attend to the earlier tokens of a token's document, (B, S, N, 3, D) -> (B, S, N, D)."""
    if row is None:
        return self_attention(qkv, causal=True, dropout_p=dropout)
    tokens = qkv.flatten(0, 1)
    if dropout == 0 and qkv.device.type == "cpu":
        out, _ = attention_of_documents(tokens, row.offsets)
    elif has_varlen(tokens):
        out = varlen_attention(tokens, row, dropout, causal=True)
    else:
        assert row.on_host is not None
        out = one_by_one(tokens, row.on_host, dropout)
    return torch.unflatten(out, 0, qkv.shape[:2])


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def one_by_one(qkv: Tensor, offsets: Tensor, dropout: float) -> Tensor:
    """Attend within each document by a call of its own: (T, N, 3, D), offsets -> (T, N, D).

    `offsets`: on the host.
    """
    outs: list[Tensor] = []
    for document in qkv.split(offsets.diff().tolist()):
        outs += self_attention(document[None], causal=True, dropout_p=dropout)
    return torch.cat(outs)


# An op, so that torch.compile makes one graph for all borders, which are numbers in a tensor.
@torch.library.custom_op("megarecipes::attention_of_documents", mutates_args=())
def attention_of_documents(qkv: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Attend within each document, on a CPU: (T, N, 3, D), offsets -> (T, N, D).

    The second output (T, N), fp32 or wider, is for the backward pass: log-sums of scores' exponentials.
    """
    T, N, _, D = qkv.shape
    out = qkv.new_empty(T, N, D)
    sums = qkv.new_empty(T, N, dtype=_sum_type(qkv))
    for document in _slices(offsets):
        q, k, v = heads_first(qkv[None, document])
        of_document, logsumexp = _flash(q, k, v, 0.0, True)
        out[document] = _tokens_first(of_document)
        sums[document] = logsumexp[0].T
    return out, sums


@torch.library.custom_op(
    "megarecipes::attention_of_documents_backward", mutates_args=()
)
def _backward(
    gradient: Tensor, qkv: Tensor, offsets: Tensor, out: Tensor, sums: Tensor
) -> Tensor:
    """Return the gradient of qkv from the output's `gradient` (T, N, D)."""
    of_qkv = torch.empty_like(qkv)
    for document in _slices(offsets):
        q, k, v = heads_first(qkv[None, document])
        upper = gradient[document].transpose(0, 1)[None]
        of_document = out[document].transpose(0, 1)[None]
        logsumexp = sums[document].T[None]
        each = _flash_backward(upper, q, k, v, of_document, logsumexp, 0.0, True)
        for part, of_part in zip(of_qkv[document].unbind(2), each, strict=True):
            part.copy_(_tokens_first(of_part))
    return of_qkv


@attention_of_documents.register_fake
def _(qkv: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    T, N, _, D = qkv.shape
    return qkv.new_empty(T, N, D), qkv.new_empty(T, N, dtype=_sum_type(qkv))


@_backward.register_fake
def _(
    gradient: Tensor, qkv: Tensor, offsets: Tensor, out: Tensor, sums: Tensor
) -> Tensor:
    return torch.empty_like(qkv)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
    return _backward(gradient, *ctx.saved_tensors), None


attention_of_documents.register_autograd(_differentiate, setup_context=_keep)


def _sum_type(qkv: Tensor) -> torch.dtype:
    return torch.promote_types(qkv.dtype, torch.float32)


def _slices(offsets: Tensor) -> list[slice]:
    return list(itertools.starmap(slice, itertools.pairwise(offsets.tolist())))


def _tokens_first(x: Tensor) -> Tensor:
    """(1, N, L, D) -> (L, N, D)."""
    return x[0].transpose(0, 1)
