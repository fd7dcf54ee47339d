"""A task as a model meets it: windows, and what their figures are divided by."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.tasks.windows import Window, counted_tokens
from data.text.vocabularies.encoder import Encoder

TaskName = Literal["wikitext103", "lambada", "perplexity"]
NO_TOKENS = np.zeros(0, dtype=np.uint32)


@dataclass(frozen=True, eq=False)
class TaskData:
    """What is scored.

    Attributes:
        variant: which form of the task; "" where there is one.
        source: file or data set.
        windows: in the order of the text; of a cloze test each is a passage whose last word counts.
        words, bytes: of the original text, before it was made the model's; None: the task counts none.
        examples: documents or passages.
        broken: rows that were left out, each with its reason.
        cut: examples of which the model reads the end alone.
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
        """Targets that count."""
        return counted_tokens(self.windows)

    @property
    def checksum(self) -> str:
        """By which ranks see that they read the same."""
        total = 0
        for window in self.windows:
            total = zlib.crc32(window.counted.to_bytes(4, "little"), total)
            total = zlib.crc32(window.tokens.astype(np.int64).tobytes(), total)
        return f"{total:08x}"


def encoded(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[np.ndarray]:
    """The tokens of each text, without special ones."""
    found = Encoder(tokenizer).encode_sentences([[text] for text in texts])
    return [each[0] if each else NO_TOKENS for each in found]
