"""Text to tokens, in batches. Imports neither transformers nor torch: worker processes of `data.prepare` start with it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from data.grouping import grouped
from data.sources.documents import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BATCH_CHARACTERS = 1 << 22  # enough for all cores
# For one core: the library's objects of a batch, some 100 bytes per token, then stay in the processor's cache.
ONE_CORE_BATCH_CHARACTERS = 1 << 16
_UINT32 = "I"
assert array(_UINT32).itemsize == 4


def use_all_cores() -> None:
    """Lets `tokenizers` use its threads; a user's own setting stays.

    Unset, the library turns its threads off at the first fork of the process and warns at each one.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def end_of_document(tokenizer: PreTrainedTokenizerFast) -> int:
    """The token that ends a document: the tokenizer's end-of-sequence token, or its [SEP].

    Raises:
        ValueError: it has neither.
    """
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return token
    raise ValueError(
        'the vocabulary names no end-of-sequence token and no [SEP], so documents cannot be ended: give "eos_token" in a '
        "tokenizer_config.json beside data.tokenizer.path, or another data.tokenizer.kind"
    )


class Encoder:
    """Turns documents into tokens on all cores. Special tokens spelled out in a text are text. Picklable."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, batch_characters: int = BATCH_CHARACTERS):
        self._end = end_of_document(tokenizer)
        self._batch_characters = batch_characters
        self._load(tokenizer.backend_tokenizer.to_str())

    def _load(self, backend: str) -> None:
        self._backend = Tokenizer.from_str(backend)
        # A document that spells out "<|endoftext|>" must not end itself, nor "[MASK]" stand for a masked token.
        self._backend.encode_special_tokens = True
        # Saved tokenizers can carry the lengths of their last use.
        self._backend.no_truncation()
        self._backend.no_padding()
        # The BPE's memory of 10,000 words stays: with 100,000 one process is 10 % faster, but two on one cache are 15 % slower.

    def __getstate__(self) -> dict[str, Any]:
        return {
            "end": self._end,
            "batch_characters": self._batch_characters,
            "backend": self._backend.to_str(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._end, self._batch_characters = state["end"], state["batch_characters"]
        self._load(state["backend"])  # the library's own pickling forgets encode_special_tokens

    def __call__(self, documents: Iterable[Document]) -> Iterator[tuple[Document, np.ndarray]]:
        """Yields (document, its tokens as uint32) in order, each ended by the end-of-document token."""
        for batch in grouped(documents, lambda document: len(document.text), self._batch_characters):
            yield from zip(
                batch, self._tokens([document.text for document in batch], [self._end]), strict=True
            )

    def encode_sentences(self, documents: Sequence[Sequence[str]]) -> list[list[np.ndarray]]:
        """Sentences of documents -> (tokens,) uint32 each, without special tokens.

        Sentences that the vocabulary knows nothing of (blank ones, control characters) are left out, so that a document's
        list can be shorter than it came, and empty.
        """
        texts = [sentence for sentences in documents for sentence in sentences]
        tokens = (
            found
            for batch in grouped(texts, len, self._batch_characters)
            for found in self._tokens(batch, [])
        )
        encoded = [[next(tokens) for _ in sentences] for sentences in documents]
        return [[found for found in sentences if found.size] for sentences in encoded]

    def _tokens(self, texts: list[str], end: list[int]) -> Iterator[np.ndarray]:
        """(tokens,) uint32 of each text, followed by `end`: views of one array for all."""
        use_all_cores()
        flat, bounds = array(_UINT32), [0]
        for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False):
            flat.fromlist(encoding.ids)  # half the time of np.array
            flat.extend(end)
            bounds.append(len(flat))
        whole = np.frombuffer(flat, dtype=np.uint32) if flat else np.zeros(0, dtype=np.uint32)
        return (whole[a:b] for a, b in zip(bounds, bounds[1:], strict=False))
