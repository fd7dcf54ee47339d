"""Patterns of a causal layer's attention: what each position sees of those before it."""

from __future__ import annotations

from typing import Literal, NamedTuple

AttentionKind = Literal["dense", "banded", "fixed"]


class Fixed(NamedTuple):
    """The fixed pattern (Child et al. 2019, arXiv 1904.10509, section 4.3), as DeepSpeed has had it.

    A position sees its own window up to itself, and in every window before it the same few positions, the
    global columns: the last `columns` of the window for the first head, those before them for the next, and
    after `patterns` heads the last ones again.
    """

    window: int
    columns: int
    patterns: int = 1
    # number of the first head at hand, on a tensor rank that has others than the first
    first: int = 0


Window = int | Fixed | None  # a band's positions, a fixed pattern, or None: dense
