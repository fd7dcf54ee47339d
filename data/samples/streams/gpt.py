"""What a GPT makes of a store's or a stream's documents: windows over their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from data.samples.fields import HeldOut, window_count
from data.samples.gpt import GptFields, GptSamples, Stream
from data.samples.streams.lanes import Encode, Lane, Place, Reader
from data.text.vocabularies.encoder import Encoder, end_of_document
from data.tokens.indexed import Store
from recipes.plural import counted
from recipes.problems import Setting, Text, Words
from recipes.schema import Origin, Recipe


@dataclass(frozen=True)
class GptFamily:
    """What a GPT makes of documents; every family has these methods."""

    tokenizer: PreTrainedTokenizerFast
    sequence_length: int

    sequences: ClassVar[Literal["documents"]] = "documents"
    """What one sequence of its stores holds."""

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> GptFamily:
        return cls(tokenizer, recipe.sequence_length)

    def training_samples(self, store: Store, documents: np.ndarray) -> GptSamples:
        """The samples of `documents` (D,) int64, ascending.

        Raises:
            ProblemsError: they hold too little for one sample.
        """
        return GptSamples(Stream(store, documents, end_of_document(self.tokenizer)), self.sequence_length)

    def held_out(self, store: Store, documents: np.ndarray, wanted: int) -> HeldOut:
        """At most `wanted` samples, spread evenly over the documents; raises as `training_samples`."""
        return self.training_samples(store, documents).fixed(wanted)

    def never_predicted(self) -> list[int]:
        """Tokens that a stored document holds and no sample asks for."""
        return []

    def encoder(self, origin: Origin, batch_characters: int) -> Encode:
        """What tokenizes the documents of a stream."""
        return Encoder(self.tokenizer, batch_characters)

    def lane(self, reader: Reader, number: int) -> Lane:
        return GptLane(reader, self.sequence_length)

    def stack(self, samples: Sequence[np.ndarray]) -> GptFields:
        """The fields of what lanes gave."""
        return GptFields(window=np.stack(samples))

    def for_held_out(self) -> GptFamily:
        """The same without the recipe's seed."""
        return self

    def measure(self, number: int, place: Place, encoded: np.ndarray) -> int:
        """What a document of lane `number` adds to the number that `samples` wants."""
        return encoded.size

    def samples(self, measured: int) -> int:
        """How many samples documents of that measure give."""
        return window_count(measured, self.sequence_length)

    def tokens(self, encoded: np.ndarray) -> np.ndarray:
        return encoded

    def too_short(self, measured: int) -> Text:
        """Why documents of that measure give no sample."""
        return too_short(measured, self.sequence_length)


def too_short(tokens: int, sequence_length: int) -> tuple[Words, ...]:
    """Why so many tokens give no sample."""
    length = Setting("sequence_length", sequence_length)
    return f"have {counted(tokens, 'token')}, and one sample of ", length, f" needs {sequence_length + 1}"


class GptLane(Lane):
    """Windows of T + 1 tokens over the lane's documents; the next begins with the last label of this one.

    A rest shorter than a window is left out at the end of an epoch, as at the end of stored tokens.
    """

    def __init__(self, reader: Reader, sequence_length: int):
        self._length = sequence_length
        super().__init__(reader)

    def take(self, item: int, seed: int) -> np.ndarray:
        """(T + 1,) int64. The seed has no part in it: a stream is read in its own order."""
        self._fill()
        parts, start = [], self._offset
        for _, ids in self._pending:
            parts.append(ids[max(start, 0) : max(start + self._length + 1, 0)])
            start -= ids.size
        self._use()
        return np.concatenate(parts).astype(np.int64)

    def skip(self) -> None:
        self._fill()
        self._use()

    def state(self) -> dict[str, Any]:
        place = self._pending[0][0] if self._pending else self._place
        return {**place._asdict(), "token_offset": self._offset}

    def restore(self, state: dict[str, Any]) -> None:
        self._open(Place(**{key: state[key] for key in Place._fields}))
        self._offset = state["token_offset"]
        self._fruitful = self._offset > 0

    def too_little(self) -> Text:
        return "the training documents ", *too_short(self._buffered, self._length)

    def _open(self, place: Place) -> None:
        super()._open(place)
        self._offset = 0  # tokens of the first pending document that are used up
        self._pending: deque[tuple[Place, np.ndarray]] = deque()  # documents that are not wholly used
        self._buffered = 0  # tokens in `_pending`, those before the offset included

    def _fill(self) -> None:
        while self._buffered < self._offset + self._length + 1:
            if (found := next(self._encoded, None)) is None:
                self._open_next_epoch()
                continue
            document, ids = found
            self._pending.append((document.place, ids))
            self._buffered += ids.size
            self._place = document.place._replace(record=document.place.record + 1)

    def _use(self) -> None:
        self._fruitful = True
        self._offset += self._length
        while self._pending and self._offset >= self._pending[0][1].size:
            used = self._pending.popleft()[1].size
            self._offset -= used
            self._buffered -= used
