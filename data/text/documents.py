"""Documents: where they come from, which records are none, and the token that ends each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from recipes.problems import Key, ProblemsError, counted, some

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True)
class Document:
    """The text of a record, with the record's index."""

    # of the record, from 0, in the source or the shard that is read; all records count
    index: int
    text: str


class SkippedRecords:
    """The broken records left out by this process; a record met again counts once."""

    MOST = 100_000  # records to remember; later ones are not counted

    def __init__(self) -> None:
        self._found: set[str] = set()

    def add(self, where: str, kind: str) -> None:
        if len(self._found) < self.MOST:
            self._found.add(f"{where}: {kind}")

    def found(self) -> list[str]:
        """List place and kind of each record."""
        return sorted(self._found.copy())  # a loader's thread may be adding

    @staticmethod
    def describe(found: Sequence[str]) -> str:
        """Tell how many records were left out, and name the first."""
        least = "at least " if len(found) >= SkippedRecords.MOST else ""
        return f"{least}{counted(len(found), 'broken record')} left out ({some(found)})"


class Source(Protocol):
    """A readable collection of documents.

    All but `fingerprint` raise ProblemsError where the dataset cannot be opened, and the readers where a
    record is broken.
    """

    name: str
    finite: bool  # False: streamed; never tokenized as a whole
    # collects the broken records; None: they stop a reader
    skipped: SkippedRecords | None

    @property
    def shards(self) -> int:
        """Number of independently readable parts, e.g. files."""

    def fingerprint(self) -> str:
        """Return a hexadecimal digest of the documents."""

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield the documents of all shards in order, from index `start` on, without the empty ones."""

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        """Yield the documents of one shard, from index `start` within it on, without the empty ones."""


class OneShard(Source):
    """A finite source that is not read in parts."""

    shards = 1
    finite = True

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        assert shard == 0
        return self.documents(start)


def end_of_document(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the end-of-document token: end-of-sequence, or [SEP]. Raises ProblemsError: there is neither."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    fix = (
        'give "eos_token" in a tokenizer_config.json next to ',
        Key("data.tokenizer.path"),
        ", or another ",
        Key("data.tokenizer.kind"),
    )
    came = "the vocabulary names no end-of-sequence token and no [SEP]"
    raise ProblemsError.of(
        "data.tokenizer.kind", came, "documents cannot be ended", fix
    )
