"""A plain one-process GPT-2 in the manner of nanoGPT, for speed comparisons."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.schema import Recipe


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, dropout: float) -> Tensor:
        q, k, v = (
            self.qkv(self.norm_1(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        # (B, heads, S, D)
        seen = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True
        )
        x = x + F.dropout(self.projection(seen.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), dropout)


class NanoGpt(nn.Module):
    """GPT-2 with one dropout probability everywhere, as nanoGPT."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        model = recipe.model
        self.dropout = recipe.dropout.hidden
        self.tokens = nn.Embedding(model.vocab_size, model.hidden)
        self.positions = nn.Embedding(recipe.positions, model.hidden)
        self.blocks = nn.ModuleList(
            Block(model.hidden, model.heads) for _ in range(model.layers)
        )
        self.norm = nn.LayerNorm(model.hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=recipe.init_std)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss. `tokens` and `labels`, the next tokens: (B, S)."""
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        x = F.dropout(x, self.dropout)
        for block in self.blocks:
            x = block(x, self.dropout)
        logits = F.linear(self.norm(x), self.tokens.weight)  # tied
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
