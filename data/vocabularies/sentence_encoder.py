"""Documents to the tokens of their sentences, in batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.grouping import grouped
from data.sources import sentences
from data.vocabularies.vocabulary import Encoder

_BATCH_CHARACTERS = 1 << 22


class SentenceEncoder:
    """What `Encoder` is for a GPT: yields (document, its sentences' tokens, uint32 without special tokens) in order."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        how: Literal["split", "lines"],
        batch_characters: int = _BATCH_CHARACTERS,
    ):
        self._encoder, self._how, self._batch_characters = Encoder(tokenizer), how, batch_characters

    def __call__(self, documents: Iterable[Any]) -> Iterator[tuple[Any, list[np.ndarray]]]:
        for batch in grouped(documents, lambda document: len(document.text), self._batch_characters):
            encoded = self._encoder.encode_sentences(
                [sentences.split(document.text, self._how) for document in batch]
            )
            yield from zip(batch, encoded, strict=True)
