"""Documents and what they are read from: the same ones in the same order every time.

Sources are read strictly: a broken record stops the reader with its place, the reason and the fix. Files that
are known to have such records go through launch/prepare_data.py, which counts them and keeps them aside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.sources.records import Broken, RecordFormat
from recipes.problems import Problem, ProblemsError


@dataclass(frozen=True, slots=True)
class Document:
    """The text of a record, and which record it is."""

    index: int  # of the record, from 0, in the source or the shard that is read; all records count
    text: str


class Source(Protocol):
    """A readable collection of documents.

    Raises:
        ProblemsError: by all but `fingerprint`, the dataset cannot be opened; by readers, a record is broken.
    """

    name: str
    finite: bool  # False: streamed; never tokenized as a whole

    @property
    def shards(self) -> int:
        """Parts that can be read independently of one another, e.g. files."""

    def fingerprint(self) -> str:
        """Hexadecimal digest that changes when the documents change."""

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Documents of all shards in order, from index `start` on, without the empty ones."""

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        """Documents of one shard, from index `start` within it on, without the empty ones."""


def read_strictly(paths: Sequence[Path], format: RecordFormat, start: int) -> Iterator[Document]:
    """Documents of several files, numbered through; records before `start` are framed and not parsed."""
    first = 0  # index of the file's first record
    for path in paths:
        begin = start if len(paths) == 1 else 0  # within one file the format may skip faster than by reading
        index = first + begin - 1
        for index, raw in enumerate(format.frame(path, begin), first + begin):
            if index < start:
                continue
            found = raw if isinstance(raw, Broken) else format.parse(raw)
            if isinstance(found, Broken):
                raise refusal(f"{found.file}:{found.number}", found)
            if found:
                yield Document(index, found)
        first = index + 1


def refusal(where: str, found: Broken) -> ProblemsError:
    """What a strict reader raises for a broken record."""
    fix = "launch/prepare_data.py counts broken records and continues"
    return ProblemsError([Problem("data.name", f"{where}: {found.kind}", found.detail, fix)])
