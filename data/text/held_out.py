"""The documents held out of training: chosen by index, or the end of a text of too few or too short ones.

Whole documents are held out, so that training sees no held-out text. The rule needs a document's index only,
and not their number, so that it holds for streams too.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Literal

from data.text.documents import Document, OneShard, SkippedRecords, Source
from data.text.sources import open_source
from recipes.families import TRAINED
from recipes.problems import counted
from recipes.schema import Recipe

if TYPE_CHECKING:
    import numpy as np

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
"""Names of the numbers in the result of `parts`."""
END = "the end of the text is held out, since whole documents are too few or too short"
_KINDS = {"packaged": "plain text", "text": "plain text", "jsonl": "JSON lines"}
# of a token, at most where a vocabulary fits its text: English has 4.5 in GPT-2's
CHARACTERS = 6
_BLANKS = (" ", "\n", "\t")
_LONGEST_WORD = 50  # characters, in which a blank is looked for


def part_of(index: int, validation_every: int, test_every: int | None = None) -> Part:
    """Return the part of the document at `index` of its source, from 0.

    Every `validation_every`-th document (2 or more) is for validation. The others are counted anew, and every
    `test_every`-th of them (2 or more; None: no test part) is for the test, beginning with the first.
    """
    if index % validation_every == validation_every - 1:
        return "validation"
    left_before = index - index // validation_every
    return (
        "test" if test_every is not None and left_before % test_every == 0 else "train"
    )


def parts(
    indices: np.ndarray, validation_every: int, test_every: int | None = None
) -> np.ndarray:
    """Return the positions in `PARTS`, (N,) uint8, of documents `indices` (N,); see `part_of`."""
    import numpy as np

    assert validation_every >= 2 and (test_every is None or test_every >= 2), (
        "the schema refuses 1"
    )
    numbers = np.asarray(indices % validation_every == validation_every - 1, np.uint8)
    if test_every is not None:
        # Counting what validation leaves, and not all documents, keeps 1/test_every of it whatever divisors
        # the two have in common.
        left_before = indices - indices // validation_every
        numbers[(numbers == 0) & (left_before % test_every == 0)] = PARTS.index("test")
    return numbers


def documents_of(
    part: Part, documents: int, validation_every: int, test_every: int | None = None
) -> np.ndarray:
    """Return the indices (N,) int64, ascending, of one part's documents among `documents` documents."""
    import numpy as np

    numbers = parts(np.arange(documents, dtype=np.int64), validation_every, test_every)
    return np.flatnonzero(numbers == PARTS.index(part))


class EndHeldOut(OneShard):
    """A source whose last characters are its held-out documents."""

    def __init__(
        self,
        source: Source,
        characters: int,
        validation_every: int,
        test_every: int | None,
    ):
        """Wrap a source; one sample surely needs at most so many `characters`."""
        self.name = source.name
        self.skipped = source.skipped
        self._source = source
        self._characters = characters
        self._validation_every = validation_every
        self._test_every = test_every

    def fingerprint(self) -> str:
        rule = f"end {self._characters} {self._validation_every} {self._test_every} "
        return hashlib.sha256((rule + self._source.fingerprint()).encode()).hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield the pieces under numbers that the rule of the split gives to their parts."""
        texts = [document.text for document in self._source.documents()]
        parts = {"validation": self._validation_every}
        if self._test_every:
            parts["test"] = self._test_every
        total = sum(map(len, texts))
        needed = min(self._characters, total // (len(parts) + 2))
        waiting = {}
        for part, every in parts.items():
            waiting[part] = deque(cut_end(texts, max(total // every, needed)))
        waiting["train"] = deque(texts)
        for index in count():
            if not any(waiting.values()):
                return
            pieces = waiting[part_of(index, self._validation_every, self._test_every)]
            if pieces:
                document = Document(index, pieces.popleft())
                if index >= start:
                    yield document


def cut_end(texts: list[str], characters: int) -> list[str]:
    """Take the last `characters` off the texts, and what a word has before them; return them."""
    end = deque[str]()
    while characters > 0 and texts:
        text = texts.pop()
        at = len(text) - characters
        if at > 0:
            before = text[max(0, at - _LONGEST_WORD) : at]
            word = len(before) - 1 - max(before.rfind(blank) for blank in _BLANKS)
            at -= word if word < len(before) else 0
            texts.append(text[:at])
        end.appendleft(text[max(at, 0) :])
        characters = -at
    return [*end]


def with_held_out_text(recipe: Recipe, source: Source) -> Source:
    """Return the source, with its end held out where its held-out documents are shorter than a sample.

    Reads documents until enough of them are held out. Raises ProblemsError: one is broken.
    """
    data = recipe.data
    wanted = CHARACTERS * (recipe.sequence_length + 1)
    if not source.finite:
        return source
    parts = {"validation", "test"} if data.test_every else {"validation"}
    characters = Counter[str]()
    for document in source.documents():
        characters[part_of(document.index, data.validation_every, data.test_every)] += (
            len(document.text)
        )
        if characters["train"] and all(characters[part] >= wanted for part in parts):
            return source
    return EndHeldOut(source, wanted, data.validation_every, data.test_every)


def describe_text(recipe: Recipe) -> str:
    """Say what a plan knows of the text: files, bytes, kind, column, split and vocabulary."""
    from data.text.listing import splits_of
    from data.text.local_files import files_of

    data = recipe.data
    told = []
    ends = False
    for origin in data.origins:
        if origin.source in ("hub", "store"):
            told.append(f"{origin.name} ({origin.source})")
            continue
        skipped = SkippedRecords() if data.broken_records == "skip" else None
        source = with_held_out_text(recipe, open_source(origin, skipped=skipped))
        files = files_of(origin)
        size = sum(file.size for file in files)
        column = (
            f", column {origin.text_column}"
            if origin.source in ("jsonl", "parquet")
            else ""
        )
        kind = _KINDS.get(origin.source, origin.source)
        splits = splits_of(files)
        named = f", named {' and '.join(splits)}" if splits else ""
        told.append(
            f"{source.name}: {counted(len(files), 'file')} of {kind}{column}{named}, {size:,} bytes"
        )
        ends |= isinstance(source, EndHeldOut)
    kind = data.tokenizer.kind
    path = data.tokenizer.path
    vocabulary = f"vocabulary {kind} of {recipe.model.vocab_size:,} tokens"
    if kind in TRAINED:
        vocabulary += ", trained on it"
    elif path:
        vocabulary += f" ({path})"
    split = END if ends else f"every {data.validation_every}th document is held out"
    return "; ".join([*told, split, vocabulary])
