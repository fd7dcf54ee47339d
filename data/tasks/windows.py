"""Windows to score: runs of tokens read at once, with the last targets counted."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

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


def overlapping_windows(tokens: np.ndarray, length: int, stride: int) -> Iterator[Window]:
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


def full_context_windows(tokens: np.ndarray, length: int, stride: int) -> Iterator[Window]:
    """Yield windows like `overlapping_windows`, with a last window of full `length`, for more context.

    With stride = length these are `loglikelihood_rolling`'s of lm-evaluation-harness.
    """
    found = list(overlapping_windows(tokens, length, stride))
    yield from found[:-1]
    if found:
        yield Window(tokens[max(0, len(tokens) - length - 1) :], found[-1].counted)


TaskName = Literal["wikitext103", "lambada", "perplexity"]
NO_TOKENS = np.zeros(0, dtype=np.uint32)


@dataclass(frozen=True, eq=False)
class TaskData:
    """The windows of a task, and facts about its text.

    Attributes:
        variant: which form of the task; "" where there is one.
        source: file or data set.
        windows: in the order of the text; in a cloze test each is a passage, and its last word counts.
        words, bytes: of the original text; None: the task counts none.
        examples: documents or passages.
        broken: rows that were left out, each with its reason.
        cut: examples of which the model reads only the end.
    """

    task: TaskName
    variant: str
    source: str
    windows: tuple[Window, ...]
    words: int | None
    examples: int
    broken: tuple[str, ...] = ()
    cut: int = 0
    bytes: int | None = None

    @property
    def tokens(self) -> int:
        """Number of counted targets."""
        return sum(window.counted for window in self.windows)

    @property
    def checksum(self) -> str:
        """CRC-32 of the windows, for ranks to compare."""
        total = 0
        for window in self.windows:
            total = zlib.crc32(window.counted.to_bytes(4, "little"), total)
            total = zlib.crc32(window.tokens.astype(np.int64).tobytes(), total)
        return f"{total:08x}"


def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode each text, without special tokens."""
    found = Encoder(tokenizer).encode_sentences([[text] for text in texts])
    return [each[0] if each else NO_TOKENS for each in found]
