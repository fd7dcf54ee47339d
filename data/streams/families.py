"""The families: what each makes of documents.

A family is one object, and a third one would be one more file and line here.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Literal, Protocol

import numpy as np
from transformers import PreTrainedTokenizerFast
from typing_extensions import Self

from data.samples.fields import Fields, HeldOut, TrainingSamples
from data.stores.indexed import Store
from data.streams.bert import BertFamily
from data.streams.gpt import GptFamily
from data.streams.lanes import Encode, Lane, Place, Reader
from recipes.problems import Text
from recipes.schema import Origin, Recipe


class StoredSamples(TrainingSamples, Sized, Protocol):
    """Samples of a store, of which there is a number in an epoch."""


class Family(Protocol):
    """A family's samples of a store, and its encoding, lanes and samples of a stream."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast: ...

    @property
    def sequences(self) -> Literal["documents", "sentences"]:
        """What one sequence of its stores holds."""
        ...

    def training_samples(self, store: Store, documents: np.ndarray) -> StoredSamples:
        """The samples of `documents` (D,) int64, ascending.

        Raises:
            ProblemsError: they hold too little for one sample.
        """
        ...

    def held_out(self, store: Store, documents: np.ndarray, wanted: int) -> HeldOut:
        """At most `wanted` samples, spread evenly over the documents; raises as `training_samples`."""
        ...

    def never_predicted(self) -> list[int]:
        """Tokens that a stored document holds and no sample asks for."""
        ...

    def encoder(self, origin: Origin, batch_characters: int) -> Encode:
        """What tokenizes documents."""
        ...

    def lane(self, reader: Reader, number: int) -> Lane: ...

    def stack(self, samples: Sequence[Any]) -> Fields:
        """The fields of what lanes gave."""
        ...

    def for_held_out(self) -> Self:
        """The same without the recipe's seed."""
        ...

    def measure(self, number: int, place: Place, encoded: Any) -> int:
        """What a document of lane `number` adds to the number that `samples` wants."""
        ...

    def samples(self, measured: int) -> int:
        """How many samples documents of that measure give."""
        ...

    def tokens(self, encoded: Any) -> np.ndarray: ...

    def too_short(self, measured: int) -> Text:
        """Why documents of that measure give no sample."""
        ...


FAMILIES: dict[str, type[GptFamily] | type[BertFamily]] = {"gpt2": GptFamily, "bert": BertFamily}


def family_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Family:
    """The recipe's family.

    Raises:
        ProblemsError: the vocabulary does not fit it.
    """
    return FAMILIES[recipe.model.family].of(recipe, tokenizer)
