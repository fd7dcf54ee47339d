"""Datasets that are tokenized while they stream in, for those too large to prepare first.

Documents keep the order of the stream, samples are the same windows as those of stored tokens, and the position in the
stream (documents consumed, tokens of the next one already used) is all a resumed run needs.

Every rank reads the whole stream and keeps its own rows, so that the batch of a step does not depend on the layout.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.cache import SAY_EVERY_S, Say
from data.samples import Parts, Samples, window_count
from data.sources import Document, Source, held_out, train_documents
from data.vocabulary import Encoder
from recipes.schema import Recipe

UNIGRAM_TOKENS = 200_000
_BATCH_CHARACTERS = 1 << 19  # tokenized at once: about 0.1 s of work, so that the first batch comes soon
_HEAD_BATCH_CHARACTERS = 1 << 16  # reads little beyond what is wanted: 20 documents pass for one that is held out


class StreamedSamples:
    """Windows over the training documents of a stream, epoch after epoch in the stream's order.

    Windows are read in sequence; going back starts the stream again, which is right and slow.
    """

    def __init__(self, source: Source, encode: Encoder, sequence_length: int, validation_every: int):
        self.sequence_length = sequence_length
        self._source, self._encode, self._every = source, encode, validation_every
        self._open(Cursor())

    def take(self, positions: Iterable[int], seed: int) -> np.ndarray:
        """(len(positions), T + 1) int64. The seed has no part in it: a stream is read in its own order."""
        rows = []
        for position in positions:
            self._advance(position)
            rows.append(self._next_window())
        return np.stack(rows)

    def state(self, position: int) -> dict[str, Any]:
        self._advance(position)
        return {
            "position": position,
            "epoch": self._epoch,
            "documents": self._pending[0][0] if self._pending else self._next_document,
            "token_offset": self._offset,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._open(Cursor(state["position"], state["epoch"], state["documents"], state["token_offset"]))

    def fresh(self) -> StreamedSamples:
        return StreamedSamples(self._source, self._encode, self.sequence_length, self._every)

    def _advance(self, position: int) -> None:
        if position < self._position:
            self._open(Cursor())
        while self._position < position:
            self._next_window()

    def _open(self, cursor: Cursor) -> None:
        self._position, self._epoch, self._next_document = cursor.position, cursor.epoch, cursor.documents
        self._offset = cursor.token_offset  # tokens of the first pending document that are used up
        self._pending: deque[tuple[int, np.ndarray]] = deque()  # (document index, tokens), not wholly used
        self._buffered = 0  # tokens in `_pending`, those before the offset included
        self._encoded = self._encode(train_documents(self._source, self._every, cursor.documents))

    def _next_window(self) -> np.ndarray:
        if not self._fill(self._offset + self.sequence_length + 1):
            self._next_epoch()
        parts, missing, skip = [], self.sequence_length + 1, self._offset
        for _, ids in self._pending:
            parts.append(ids[skip : skip + missing])
            missing -= parts[-1].size
            skip = 0
            if not missing:
                break
        self._offset += self.sequence_length
        while self._pending and self._offset >= self._pending[0][1].size:
            used = self._pending.popleft()[1].size
            self._offset -= used
            self._buffered -= used
        self._position += 1
        return np.concatenate(parts).astype(np.int64)

    def _fill(self, tokens: int) -> bool:
        """Reads until `tokens` are buffered; False if the stream ends before."""
        while self._buffered < tokens:
            if (found := next(self._encoded, None)) is None:
                return False
            document, ids = found
            self._pending.append((document.index, ids))
            self._next_document = document.index + 1
            self._buffered += ids.size
        return True

    def _next_epoch(self) -> None:
        """Starts the stream again; a rest shorter than a window is left out, as at the end of stored tokens."""
        self._open(Cursor(self._position, self._epoch + 1))
        if not self._fill(self.sequence_length + 1):
            raise ValueError(
                f"{self._source.name}: the training documents have {self._buffered} tokens, and one sample of "
                f"sequence_length={self.sequence_length} needs {self.sequence_length + 1}: give more text"
            )


@dataclass(frozen=True)
class Cursor:
    """A place in a stream: windows before it, epoch, documents wholly used, tokens used of the next one."""

    position: int = 0
    epoch: int = 0
    documents: int = 0
    token_offset: int = 0


@dataclass(frozen=True)
class StreamHead:
    """What the first documents of a stream yield before training starts."""

    held_out_tokens: np.ndarray  # (N,)
    train_counts: np.ndarray  # (V,) of the first training tokens
    documents: int


def read_head(
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    every: int,
    held_out_tokens: int,
    unigram_tokens: int,
    say: Say,
) -> StreamHead:
    """Reads until there are enough held-out tokens, and enough training tokens to count; less if the stream ends."""
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    parts: list[np.ndarray] = []
    documents = held = counted = 0
    last = time.monotonic()

    def wanted() -> Iterator[Document]:
        for document in source.documents():
            # Training documents beyond the counted ones are passed over untokenized.
            if held_out(document.index, every) or counted < unigram_tokens:
                yield document
            if held >= held_out_tokens and counted >= unigram_tokens:
                return

    for document, ids in Encoder(tokenizer, _HEAD_BATCH_CHARACTERS)(wanted()):
        documents = document.index + 1
        if held_out(document.index, every):
            parts.append(ids)
            held += ids.size
            if time.monotonic() - last >= SAY_EVERY_S:
                last = time.monotonic()
                say(f"{source.name}: {held:,} of {held_out_tokens:,} validation tokens after {documents:,} documents")
        elif counted < unigram_tokens:
            ids = ids[: unigram_tokens - counted]
            counts += np.bincount(ids, minlength=counts.size)
            counted += ids.size
    return StreamHead(np.concatenate(parts or [np.empty(0, np.uint32)]), counts, documents)


def stream_parts(recipe: Recipe, source: Source, tokenizer: PreTrainedTokenizerFast, say: Say) -> Parts:
    """The parts of a streamed source.

    Validation samples are the first windows of the first held-out documents.

    Raises:
        ValueError: the stream cannot be read, or ends before it has held out one sample.
    """
    length, every, wanted = recipe.sequence_length, recipe.data.validation_every, recipe.run.validation_samples
    target = wanted * length + 1
    say(f"{source.name}: streaming; holding out its first {target:,} validation tokens, every {every}th document")
    head = read_head(source, tokenizer, every, target, UNIGRAM_TOKENS, say)
    available = window_count(head.held_out_tokens.size, length)
    if available == 0:
        raise ValueError(
            f"{source.name}: with data.validation_every={every} the held-out documents have "
            f"{head.held_out_tokens.size} tokens, and one sample of sequence_length={length} "
            f"needs {length + 1}: set data.validation_every or sequence_length lower"
        )
    count = min(available, wanted)
    return Parts(
        StreamedSamples(source, Encoder(tokenizer, _BATCH_CHARACTERS), length, every),
        Samples(head.held_out_tokens[: count * length + 1], length),
        head.train_counts,
        {
            "documents_read_for_validation": head.documents,
            "held_out_tokens": head.held_out_tokens.size,
            "unigram_tokens": int(head.train_counts.sum()),
        },
    )
