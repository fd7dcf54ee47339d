"""Samples, lanes and encoders of each model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.bert import BertFields, BertSamples, BertSettings, Sample, fixed_samples, stack
from data.samples.fields import HELD_OUT_SEED, HeldOut, window_count
from data.samples.gpt import GptFields, GptSamples, Stream
from data.samples.lanes import BertLane, Encode, GptLane, Lane, Place, Reader, text_of, too_short
from data.samples.masking import BertVocabulary, check_whole_words
from data.text.encoder import Encoder, SentenceEncoder, end_of_document
from data.tokens.store import Store
from recipes.families import FAMILIES
from recipes.problems import Text
from recipes.schema import Origin, Recipe


@dataclass(frozen=True)
class GptFamily:
    """GPT's samples of documents; every family has these methods."""

    tokenizer: PreTrainedTokenizerFast
    sequence_length: int

    sequences: ClassVar[Literal["documents"]] = "documents"
    """Content of one sequence of a store."""

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> GptFamily:
        return cls(tokenizer, recipe.sequence_length)

    def training_samples(self, store: Store, documents: np.ndarray) -> GptSamples:
        """Make the training samples of `documents` (D,) int64, ascending.

        Raises ProblemsError: they hold too little for one sample.
        """
        return GptSamples(Stream(store, documents, end_of_document(self.tokenizer)), self.sequence_length)

    def held_out(self, store: Store, documents: np.ndarray, wanted: int) -> HeldOut:
        """Make at most `wanted` samples, spread evenly over the documents; raises as `training_samples`."""
        return self.training_samples(store, documents).fixed(wanted)

    def never_predicted(self) -> list[int]:
        """List the tokens of stored documents that are never labels."""
        return []

    def encoder(self, origin: Origin, batch_characters: int) -> Encode:
        """Make the encoder of a stream's documents."""
        return Encoder(self.tokenizer, batch_characters)

    def lane(self, reader: Reader, number: int) -> Lane:
        return GptLane(reader, self.sequence_length)

    def stack(self, samples: Sequence[np.ndarray]) -> GptFields:
        """Stack the items of lanes into fields."""
        return GptFields(window=np.stack(samples))

    def for_held_out(self) -> GptFamily:
        """Return the family without the recipe's seed."""
        return self

    def measure(self, number: int, place: Place, encoded: np.ndarray) -> int:
        """Measure a document of lane `number`; `samples` takes the sum over documents."""
        return encoded.size

    def samples(self, measured: int) -> int:
        """Return the number of samples in documents of that measure."""
        return window_count(measured, self.sequence_length)

    def tokens(self, encoded: np.ndarray) -> np.ndarray:
        return encoded

    def too_short(self, measured: int) -> Text:
        """Say why documents of that measure give no sample."""
        return too_short(measured, self.sequence_length)


@dataclass(frozen=True)
class BertFamily:
    """BERT's samples of documents: segments of their sentences."""

    tokenizer: PreTrainedTokenizerFast
    vocabulary: BertVocabulary
    settings: BertSettings

    sequences: ClassVar[Literal["sentences"]] = "sentences"

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> BertFamily:
        """Take the recipe's settings and the vocabulary's tokens.

        Raises ProblemsError: whole words are to be masked, and the vocabulary does not tell where words
        begin.
        """
        vocabulary, settings = BertVocabulary.of(tokenizer), BertSettings.of(recipe)
        check_whole_words(vocabulary, settings.masking)
        return cls(tokenizer, vocabulary, settings)

    def training_samples(self, store: Store, documents: np.ndarray) -> BertSamples:
        return BertSamples(store, documents, self.settings, self.vocabulary)

    def held_out(self, store: Store, documents: np.ndarray, wanted: int) -> HeldOut:
        return fixed_samples(store, documents, self.settings, self.vocabulary, wanted)

    def never_predicted(self) -> list[int]:
        return self.tokenizer.all_special_ids

    def encoder(self, origin: Origin, batch_characters: int) -> Encode:
        return SentenceEncoder(self.tokenizer, origin.sentences, batch_characters)

    def lane(self, reader: Reader, number: int) -> Lane:
        return BertLane(reader, number, self.settings, self.vocabulary)

    def stack(self, samples: Sequence[Sample]) -> BertFields:
        return stack(samples, self.vocabulary, self.settings)

    def for_held_out(self) -> BertFamily:
        return replace(self, settings=replace(self.settings, seed=HELD_OUT_SEED))

    def measure(self, number: int, place: Place, encoded: list[np.ndarray]) -> int:
        return len(text_of(number, place, encoded, self.settings).starts) if encoded else 0

    def samples(self, measured: int) -> int:
        return measured

    def tokens(self, encoded: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.empty(0, np.uint32), *encoded])

    def too_short(self, measured: int) -> Text:
        return "have no text"


Family = GptFamily | BertFamily


def kind_of(family: str) -> type[GptFamily] | type[BertFamily]:
    return BertFamily if FAMILIES[family].masked else GptFamily


def family_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Family:
    """Make the recipe's family, once per corpus.

    Raises ProblemsError: the vocabulary does not fit it.
    """
    return kind_of(recipe.model.family).of(recipe, tokenizer)
