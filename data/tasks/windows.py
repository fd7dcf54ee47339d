"""Windows of tokens that a GPT is scored on: what it reads, and which of its predictions count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.text.encoder import Encoder


@dataclass(frozen=True, eq=False)
class Window:
    """n + 1 tokens: a model reads the first n and predicts the last n; the last `counted` of them count."""

    tokens: np.ndarray  # (n + 1,)
    counted: int

    def __post_init__(self) -> None:
        assert 1 <= self.counted < len(self.tokens), (self.counted, len(self.tokens))

    @property
    def length(self) -> int:
        """Number of tokens to read."""
        return len(self.tokens) - 1


def overlapping_windows(
    tokens: np.ndarray, length: int, stride: int
) -> Iterator[Window]:
    """Yield windows of `length` tokens, one every `stride` tokens; every target counts once.

    The first window counts all its targets, each later one its last `stride`, the last one the rest. So a
    target after the first window is predicted from at least `length - stride` tokens. The first token is no
    target.

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


def full_context_windows(
    tokens: np.ndarray, length: int, stride: int
) -> Iterator[Window]:
    """Yield windows like `overlapping_windows`, with a last window of full `length`, for more context.

    With stride = length these are `loglikelihood_rolling`'s of lm-evaluation-harness.
    """
    found = list(overlapping_windows(tokens, length, stride))
    yield from found[:-1]
    if found:
        yield Window(tokens[max(0, len(tokens) - length - 1) :], found[-1].counted)


def encode_texts(encoder: Encoder, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode each text, without special tokens."""
    found = encoder.encode_sentences([[text] for text in texts])
    return [each[0] if each else np.zeros(0, dtype=np.uint32) for each in found]
