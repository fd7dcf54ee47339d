"""What the two families make of a stream's documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.bert import BertSettings, Sample, stack
from data.samples.fields import Fields, window_count
from data.samples.masking import BertVocabulary, check_whole_words
from data.streams.bert_lane import BertLane, text_of
from data.streams.lanes import Encode, GptLane, Lane, Place
from data.vocabularies.sentence_encoder import SentenceEncoder
from data.vocabularies.vocabulary import Encoder
from recipes.schema import Origin, Recipe

HELD_OUT_SEED = 0  # not the recipe's: runs that differ in it are compared on the same samples


class Kind(Protocol):
    """A family's encoding of documents, its lanes and its samples."""

    def encoder(self, batch_characters: int) -> Encode:
        """What tokenizes documents."""
        ...

    def lane(self, reader: Any, number: int) -> Lane: ...

    def stack(self, samples: Sequence[Any]) -> Fields:
        """Fields of what lanes gave."""
        ...

    def for_held_out(self) -> Kind:
        """The same without the recipe's seed."""
        ...

    def measure(self, number: int, place: Place, encoded: Any) -> int:
        """What a document of lane `number` adds to the number that `samples` wants."""
        ...

    def samples(self, measured: int) -> int:
        """How many samples documents of that measure give."""
        ...

    def tokens(self, encoded: Any) -> np.ndarray: ...

    def too_short(self, measured: int) -> str:
        """Why documents of that measure give no sample."""
        ...


@dataclass(frozen=True)
class GptKind:
    tokenizer: PreTrainedTokenizerFast
    sequence_length: int

    def encoder(self, batch_characters: int) -> Encode:
        return Encoder(self.tokenizer, batch_characters)  # type: ignore[return-value,arg-type]

    def lane(self, reader: Any, number: int) -> Lane:
        return GptLane(reader, self.sequence_length)

    def stack(self, samples: Sequence[np.ndarray]) -> Fields:
        return {"window": np.stack(samples)}

    def for_held_out(self) -> GptKind:
        return self

    def measure(self, number: int, place: Place, encoded: np.ndarray) -> int:
        return encoded.size

    def samples(self, measured: int) -> int:
        return window_count(measured, self.sequence_length)

    def tokens(self, encoded: np.ndarray) -> np.ndarray:
        return encoded

    def too_short(self, measured: int) -> str:
        return f"have {measured} tokens, and one sample of sequence_length={self.sequence_length} needs {self.sequence_length + 1}"


@dataclass(frozen=True)
class BertKind:
    tokenizer: PreTrainedTokenizerFast
    vocabulary: BertVocabulary
    settings: BertSettings
    sentences: Literal["split", "lines"]

    def encoder(self, batch_characters: int) -> Encode:
        return SentenceEncoder(self.tokenizer, self.sentences, batch_characters)

    def lane(self, reader: Any, number: int) -> Lane:
        return BertLane(reader, number, self.settings, self.vocabulary)

    def stack(self, samples: Sequence[Sample]) -> Fields:
        return stack(samples, self.vocabulary, self.settings)

    def for_held_out(self) -> BertKind:
        return replace(self, settings=replace(self.settings, seed=HELD_OUT_SEED))

    def measure(self, number: int, place: Place, encoded: list[np.ndarray]) -> int:
        return len(text_of(number, place, encoded, self.settings).starts) if encoded else 0

    def samples(self, measured: int) -> int:
        return measured

    def tokens(self, encoded: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.uint32), *encoded])

    def too_short(self, measured: int) -> str:
        return "have no text"


def stream_kind(recipe: Recipe, origin: Origin, tokenizer: PreTrainedTokenizerFast) -> Kind:
    """
    Raises:
        ValueError: whole words are to be masked, and the vocabulary does not tell where words begin.
    """
    if recipe.model.family == "gpt2":
        return GptKind(tokenizer, recipe.sequence_length)
    vocabulary = BertVocabulary.of(tokenizer)
    check_whole_words(vocabulary, recipe.data.masking)
    return BertKind(tokenizer, vocabulary, BertSettings.of(recipe), origin.sentences)
