"""The cache of decoding: keys and values of earlier tokens in every layer.

Samples of a batch are right-aligned in columns: their newest tokens share one column, and a prompt shorter
than the longest begins after some columns of padding:

    column     0 1 2 3 4 5
    sample 0   a b c d e .      padding 0: position = column
    sample 1   - - a b c .      padding 2: position = column - 2

Two tokens of a sample are as many columns apart as positions.

Shapes: B samples, S new columns, L columns with them, N heads of this rank, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from modeling.sparse_attention import sparse_attention, visible
from recipes.attention_patterns import Fixed, Window


class Past:
    """The columns of a batch, and the keys and values of each layer."""

    def __init__(self, padding: Tensor, columns: int, layers: int):
        """Make an empty cache of at most `columns` columns; padding (B,): columns before each first token."""
        self.padding, self.columns = padding, columns
        self.length = 0  # columns that all layers have read
        self.layers = [KeysAndValues(self) for _ in range(layers)]
        self.padded = bool(padding.any())
        self._masks: dict[tuple[int, Window], Tensor] = {}  # of this step, equal in layers of a kind

    def places(self, new: int) -> Tensor:
        """Return the positions (B, S) of the next `new` columns; 0 in the padding."""
        columns = torch.arange(self.length, self.length + new, device=self.padding.device)
        return (columns - self.padding[:, None]).clamp(min=0)

    def advance(self, new: int) -> None:
        """Count `new` columns that every layer has read."""
        self.length += new
        self._masks.clear()

    def keep(self, rows: Tensor) -> None:
        """Forget all samples but those at `rows`."""
        self.padding = self.padding[rows]
        self.padded = bool(self.padding.any())
        for layer in self.layers:
            layer.keep(rows)

    def mask(self, new: int, window: Window, heads: int = 1) -> Tensor:
        """Return the mask (B or 1, N or 1, S, L) of `new` columns; True: visible.

        A column of padding sees itself, since weights over nothing would be NaN.
        """
        if (new, window) not in self._masks:
            padding = self.padding[:, None, None] if self.padded else self.padding.new_zeros(1, 1, 1)
            keys = torch.arange(self.length + new, device=padding.device) - padding  # positions
            queries = keys[..., self.length :].mT
            seen = visible(queries, keys, window, heads)
            if self.padded:
                seen = seen & (keys >= 0)[:, None] | (keys == queries)[:, None]
            self._masks[new, window] = seen
        return self._masks[new, window]


class KeysAndValues:
    """Keys and values of one layer, for all columns of its `Past`."""

    def __init__(self, past: Past):
        self._past = past
        self._kept: Tensor | None = None  # (2, B, N, columns, D)

    def attend(self, qkv: Tensor, window: Window) -> Tensor:
        """Attend causally from new tokens to themselves and the cached ones; add the new ones to the cache.

        qkv (B, S, N, 3, D) -> (B, S, N, D); window: what each position sees, or None.
        """
        past, new = self._past, qkv.shape[1]
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)  # each (B, N, S, D)
        if self._kept is None:
            self._kept = k.new_empty(2, *k.shape[:2], past.columns, k.shape[-1])
        length = past.length + new
        self._kept[0, :, :, past.length : length] = k
        self._kept[1, :, :, past.length : length] = v
        if past.length == 0 and not past.padded:  # as in training
            if window is not None:
                return sparse_attention(q, k, v, window).transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        # The first of the new columns reaches back furthest.
        first = max(0, past.length + 1 - window) if isinstance(window, int) else 0
        keys, values = self._kept[:, :, :, first:length]
        whole = new == 1 and not past.padded and not isinstance(window, Fixed)
        mask = None if whole else past.mask(new, window, qkv.shape[2])[..., first:]
        return F.scaled_dot_product_attention(q, keys, values, mask).transpose(1, 2)

    def keep(self, rows: Tensor) -> None:
        """Forget all samples but those at `rows`."""
        if self._kept is not None:
            self._kept = self._kept[:, rows]
