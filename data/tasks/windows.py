"""Windows: runs of tokens that a model reads at once, of which the last targets count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Window:
    """n + 1 tokens: a model reads the first n and predicts the last n, of which the last `counted` count."""

    tokens: np.ndarray  # (n + 1,)
    counted: int

    def __post_init__(self) -> None:
        assert 1 <= self.counted < len(self.tokens), (self.counted, len(self.tokens))

    @property
    def length(self) -> int:
        """Tokens that are read."""
        return len(self.tokens) - 1


def overlapping(tokens: np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """Windows that begin every `stride` tokens and read `length` of them; every target counts once.

    The first window counts all its targets, each later one its last `stride`, the last one what is left, so
    that a target but for those of the first window is predicted from `length - stride` tokens at least. The
    first token is no target.

    Source: Megatron-LM, `tasks/zeroshot_gpt/datasets.py`, which fills the last window up with padding.
    """
    assert 1 <= stride <= length, (stride, length)
    targets = len(tokens) - 1
    if targets < 1:
        return
    yield Window(tokens[: length + 1], min(length, targets))
    for start in range(stride, targets - length + stride, stride):
        taken = tokens[start : start + length + 1]
        yield Window(taken, len(taken) - 1 - (length - stride))


def with_full_context(tokens: np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """The same, but the last window, too, reads `length` tokens, so that more of them stand before its own.

    With stride = length these are `loglikelihood_rolling`'s of lm-evaluation-harness.
    """
    found = list(overlapping(tokens, length, stride))
    yield from found[:-1]
    if found:
        yield Window(tokens[max(0, len(tokens) - length - 1) :], found[-1].counted)


def counted_tokens(windows: Sequence[Window]) -> int:
    """Targets that count, in all windows."""
    return sum(window.counted for window in windows)
