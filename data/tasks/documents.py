"""Perplexity of documents, or of a recipe's held-out samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.fields import HeldOut
from data.tasks.rows import is_plain_text, read_rows, read_whole
from data.tasks.task_data import TaskData, encoded
from data.tasks.windows import Window, with_full_context
from data.text.vocabularies.encoder import end_of_document


def documents(
    tokenizer: PreTrainedTokenizerFast,
    length: int,
    stride: int,
    place: Path,
    column: str = "text",
    limit: int | None = None,
) -> TaskData:
    """Every document of a file, each predicted from its first token on, after the end-of-document token.

    A text file is one document. Words are what whitespace separates. With stride = length the windows are
    those of `loglikelihood_rolling` of lm-evaluation-harness. `limit`: documents. Raises ProblemsError.
    """
    if is_plain_text(place):
        texts, broken = [read_whole(place)], tuple[str, ...]()
    else:
        rows = read_rows(place, column, limit)
        texts, broken = [text for text in rows.texts if text.strip()], rows.broken
    end = np.array([end_of_document(tokenizer)], dtype=np.uint32)
    found = encoded(tokenizer, texts)
    windows = tuple(
        window
        for tokens in found
        for window in with_full_context(np.concatenate([end, tokens]), length, stride)
    )
    words = sum(len(text.split()) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    return TaskData("perplexity", "documents", str(place), windows, words, len(texts), broken, bytes=size)


def held_out(samples: HeldOut, source: str, limit: int | None = None) -> TaskData:
    """A recipe's held-out samples as its validation takes them: every token of a sample counts."""
    chosen = samples.take(range(len(samples))[:limit])
    windows = tuple(Window(tokens, len(tokens) - 1) for tokens in chosen["window"])
    return TaskData("perplexity", "held out", source, windows, None, len(windows))
