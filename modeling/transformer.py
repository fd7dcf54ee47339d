"""The transformer layer of GPT-2 and BERT, cut over a tensor-parallel group by heads and by MLP features.

Shapes: B samples, S positions, H hidden size, t tensor ranks, N = heads/t heads of this rank, D = H/heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modeling.attention import heads_first, self_attention
from modeling.hidden_dropout import HiddenDropout, mixed
from modeling.initialization import Init, Shard
from modeling.parallel.collectives import in_sample_order, with_summed_gradients
from modeling.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    group_size,
    tensor_parallel_random,
)
from modeling.parallel.process_grid import Group
from recipes.families import Fixed, Window

if TYPE_CHECKING:
    from modeling.unpadding import PackedRow

# Which tokens attend to which: lengths (B,), a Row of samples or of documents, or None: all tokens of a
# sample, or in a causal layer the earlier ones.
Seen: TypeAlias = "Tensor | PackedRow | None"
_TWICE = 2 * math.sqrt(2 / math.pi)
# of the original implementations
GPT2_NORM_EPS = 1e-5
BERT_NORM_EPS = 1e-12


@dataclass(frozen=True)
class LayerShape:
    """Shape of a transformer layer; the defaults are GPT-2's."""

    hidden: int
    heads: int
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    # each position sees itself and earlier ones; else every position that is not padding
    causal: bool = True
    # LayerNorm after each residual sum (original BERT) instead of before each branch
    post_norm: bool = False
    # the tanh form of GELU that GPT-2 was trained with; else the exact one
    tanh_gelu: bool = True
    norm_eps: float = GPT2_NORM_EPS
    # causal: what each position sees of itself and those before; None: all
    window: Window = None
    # causal: each position sees only its document
    within_documents: bool = False
    # Under tensor parallelism a rank holds 1/t of the positions between attention and MLP.
    sequence_parallel: bool = False
    # attention's scores, softmax and values again in the backward pass
    recomputes_core: bool = False

    def positions_group(self, group: Group) -> Group:
        """Return the tensor group that shares the positions; None: every rank holds them all."""
        return group if self.sequence_parallel else None


class LayerNorm(nn.Module):
    """LayerNorm (arXiv 1607.06450), duplicated on every tensor rank.

    `cut_over`: the group that shares the positions of its input, or None.
    """

    def __init__(
        self,
        hidden: int,
        *,
        init: Init,
        eps: float = GPT2_NORM_EPS,
        cut_over: Group = None,
    ):
        super().__init__()
        self.eps = eps
        self.cut_over = cut_over
        self.weight = init.ones("weight", (hidden,))
        self.bias = init.zeros("bias", (hidden,))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = with_summed_gradients(self.cut_over, self.weight, self.bias)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)


class Attention(nn.Module):
    """Self-attention; each tensor rank holds heads/t whole heads.

    Rows of the QKV weight are ordered (head, q/k/v, D), so that a block of rows is a block of heads.
    """

    def __init__(self, shape: LayerShape, *, group: Group, init: Init):
        super().__init__()
        self.local_heads = shape.heads // group_size(group)
        self.causal = shape.causal
        self.window = shape.window
        self.head_size = shape.hidden // shape.heads
        if isinstance(self.window, Fixed):
            self.window = self.window._replace(
                first=Shard.over(group, 0).rank * self.local_heads
            )
        self.block_mask: Any = None  # flex_attention's; see prepare
        assert self.causal or self.window is None, "sparse patterns look back only"
        # attention within padded samples, or within documents
        self.of_samples: Any = None
        self.sparse: Any = None
        if shape.within_documents:
            from modeling.documents import attention_within_documents

            self.of_samples = attention_within_documents
        elif not self.causal:
            from modeling.unpadding import attention_within_samples

            self.of_samples = attention_within_samples
        elif self.window is not None:
            from modeling.sparse_attention import sparse_attention

            self.sparse = sparse_attention
        self.dropout = shape.attention_dropout
        self.own_stream = group is not None and shape.attention_dropout > 0
        self.recomputes_core = shape.recomputes_core
        self.cut_over = shape.positions_group(group)
        how: dict[str, Any] = dict(group=group, sequence=shape.sequence_parallel)
        self.qkv = ColumnParallelLinear(
            shape.hidden, 3 * shape.hidden, init=init.child("qkv"), **how
        )
        projection = init.child("projection")
        how |= dict(init=projection, in_samples=True)
        self.projection = RowParallelLinear(shape.hidden, shape.hidden, **how)

    def prepare(self, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make a sparse layer's block mask for this length, before `forward` is traced."""
        if self.window is not None:
            from modeling.sparse_attention import prepared_mask

            heads = self.local_heads
            size = self.head_size
            self.block_mask = prepared_mask(
                device, dtype, positions, self.window, heads, size
            )

    def forward(self, x: Tensor, lengths: Seen = None) -> Tensor:
        """x (B, S, H), lengths (B,) or None where nothing is padded -> (B, S, H).

        With sequence parallelism x and the result are (B, S/t, H). Without lengths no mask is built, which
        lets the fastest attention kernels run. With a Row, B is 1, and S the tokens of the row.
        """
        qkv = self.qkv(x)
        if self.cut_over is not None:
            qkv = in_sample_order(qkv, self.cut_over)
        B, S, _ = qkv.shape
        qkv_BSN3D = qkv.view(B, S, self.local_heads, 3, -1)
        assert self.of_samples is not None or lengths is None, (
            "causal samples are packed and have no padding"
        )
        # It encloses the recomputation, too, which restores the state of the stream current here.
        with tensor_parallel_random(self.own_stream and self.training):
            if self.recomputes_core and self.training:
                out_BSND = checkpoint(
                    self._core, qkv_BSN3D, lengths, use_reentrant=False
                )
            else:
                out_BSND = self._core(qkv_BSN3D, lengths)
        x = self.projection(out_BSND.flatten(2))
        return x

    # (B, S, N, 3, D) -> (B, S, N, D)
    def _core(self, qkv: Tensor, lengths: Seen) -> Tensor:
        p = self.dropout if self.training else 0.0
        if self.of_samples is not None:
            # chosen at run time: Any
            return self.of_samples(qkv, lengths, p)  # type: ignore[no-any-return]
        if self.sparse is None:
            return self_attention(qkv, causal=True, dropout_p=p)
        out: Tensor = self.sparse(
            *heads_first(qkv), self.window, p, mask=self.block_mask
        )
        return out.transpose(1, 2)


def tanh_gelu(x: Tensor) -> Tensor:
    """Return x (1 + tanh u) / 2, u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, arXiv 1606.08415).

    Compiled for a CPU, the equal x sigmoid(2 u) takes three quarters of the time.
    """
    if x.device.type != "cpu" or not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.sigmoid(_TWICE * (wide + 0.044715 * wide**3))).to(x.dtype)


class MLP(nn.Module):
    """H -> 4H -> H with a GELU between."""

    def __init__(self, shape: LayerShape, *, group: Group, init: Init):
        super().__init__()
        hidden = shape.hidden
        wide = 4 * shape.hidden
        self.gelu = tanh_gelu if shape.tanh_gelu else F.gelu
        how: dict[str, Any] = dict(group=group, sequence=shape.sequence_parallel)
        self.expand = ColumnParallelLinear(
            hidden, wide, init=init.child("expand"), **how
        )
        self.contract = RowParallelLinear(
            wide, hidden, init=init.child("contract"), **how
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.contract(self.gelu(self.expand(x)))
        return x


class TransformerLayer(nn.Module):
    """Attention, then MLP, each with dropout and a residual sum.

    Pre-LN: x + branch(LN(x)), as in GPT-2 and Megatron-BERT (arXiv 1909.08053, figure 1b).
    Post-LN: LN(x + branch(x)), as in the original BERT. Both have the same parameters.
    """

    def __init__(self, shape: LayerShape, *, group: Group, init: Init):
        super().__init__()
        self.post_norm = shape.post_norm
        norm = partial(
            LayerNorm,
            shape.hidden,
            eps=shape.norm_eps,
            cut_over=shape.positions_group(group),
        )
        self.attention_norm = norm(init=init.child("attention_norm"))
        self.attention = Attention(shape, group=group, init=init.child("attention"))
        self.mlp_norm = norm(init=init.child("mlp_norm"))
        self.mlp = MLP(shape, group=group, init=init.child("mlp"))
        dropout = partial(HiddenDropout, shape.hidden, shape.hidden_dropout)
        self.attention_dropout = dropout(init=init.child("attention_dropout"))
        self.mlp_dropout = dropout(init=init.child("mlp_dropout"))

    def forward(
        self,
        x: Tensor,
        lengths: Seen = None,
        dropout_seeds: Tensor | None = None,
        use: int = 0,
    ) -> Tensor:
        """x (B, S, H), lengths (B,) without padding, or None -> (B, S, H); (1, T, H) with a Row.

        dropout_seeds (B, S, 2): in training; each `use` of a shared layer makes its own of them.
        With sequence parallelism x, dropout_seeds and the result hold S/t positions.
        """
        if use and dropout_seeds is not None:
            dropout_seeds = mixed(dropout_seeds, use)
        if self.post_norm:
            x = self.attention_norm(
                x + self.attention_dropout(self.attention(x, lengths), dropout_seeds)
            )
            x = self.mlp_norm(x + self.mlp_dropout(self.mlp(x), dropout_seeds))
        else:
            x = x + self.attention_dropout(
                self.attention(self.attention_norm(x), lengths), dropout_seeds
            )
            x = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), dropout_seeds)
        return x
