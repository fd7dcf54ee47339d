"""The pre-LN transformer layer of GPT-2, cut over a tensor-parallel group by heads and by MLP features.

Shapes: B samples, S positions, H hidden size, t tensor-parallel ranks, N = heads/t heads of this rank, D = H/heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from modeling.initialization import Init
from modeling.random_state import dropout, tensor_parallel_random
from modeling.tensor_parallel import ColumnParallelLinear, RowParallelLinear, group_size

LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class LayerShape:
    hidden: int
    heads: int
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0


class LayerNorm(nn.Module):
    """LayerNorm (arXiv 1607.06450), duplicated on every tensor rank."""

    def __init__(self, hidden: int, *, init: Init):
        super().__init__()
        self.weight = init.ones("weight", (hidden,))
        self.bias = init.zeros("bias", (hidden,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, LAYER_NORM_EPS)


class Attention(nn.Module):
    """Causal self-attention; each tensor rank holds heads/t whole heads.

    Rows of the QKV weight are ordered (head, q/k/v, D), so that a block of rows is a block of heads.
    """

    def __init__(self, shape: LayerShape, *, group: dist.ProcessGroup | None, init: Init):
        super().__init__()
        self.local_heads = shape.heads // group_size(group)
        self.dropout = shape.attention_dropout
        self.own_stream = group is not None and shape.attention_dropout > 0
        self.qkv = ColumnParallelLinear(shape.hidden, 3 * shape.hidden, group=group, init=init.child("qkv"), std=init.std)
        self.projection = RowParallelLinear(
            shape.hidden, shape.hidden, group=group, init=init.child("projection"), std=init.residual_std
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, H) -> (B, S, H)
        B, S, _ = x.shape
        qkv_BSN3D = self.qkv(x).view(B, S, self.local_heads, 3, -1)
        q_BNSD, k_BNSD, v_BNSD = qkv_BSN3D.permute(3, 0, 2, 1, 4).unbind(0)
        probability = self.dropout if self.training else 0.0
        with tensor_parallel_random(self.own_stream and self.training):
            out_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, dropout_p=probability, is_causal=True)
        return self.projection(out_BNSD.transpose(1, 2).reshape(B, S, -1))


class MLP(nn.Module):
    """H -> 4H -> H with the tanh form of GELU that GPT-2 was trained with."""

    def __init__(self, shape: LayerShape, *, group: dist.ProcessGroup | None, init: Init):
        super().__init__()
        wide = 4 * shape.hidden
        self.expand = ColumnParallelLinear(shape.hidden, wide, group=group, init=init.child("expand"), std=init.std)
        self.contract = RowParallelLinear(wide, shape.hidden, group=group, init=init.child("contract"), std=init.residual_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.contract(F.gelu(self.expand(x), approximate="tanh"))


class TransformerLayer(nn.Module):
    """x + attention(LN(x)), then x + MLP(LN(x)); dropout on both branches."""

    def __init__(self, shape: LayerShape, *, group: dist.ProcessGroup | None, init: Init):
        super().__init__()
        self.dropout = shape.hidden_dropout
        self.attention_norm = LayerNorm(shape.hidden, init=init.child("attention_norm"))
        self.attention = Attention(shape, group=group, init=init.child("attention"))
        self.mlp_norm = LayerNorm(shape.hidden, init=init.child("mlp_norm"))
        self.mlp = MLP(shape, group=group, init=init.child("mlp"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, S, H) -> (B, S, H)
        x = x + dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
        return x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)
