"""Documents and what they are read from: the same ones in the same order every time.

Sources are read strictly: a broken record stops the reader with its place, the reason and the fix. With
data.broken_records=skip it is counted and left out, like an empty document: it keeps its number, so that
every other document stays in its split. launch/prepare_data.py keeps such records aside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.text.sources.records import Broken, RecordFormat
from recipes.plural import counted
from recipes.problems import Problem, ProblemsError, Setting, some


@dataclass(frozen=True, slots=True)
class Document:
    """The text of a record, and which record it is."""

    index: int  # of the record, from 0, in the source or the shard that is read; all records count
    text: str


class Skipped:
    """The broken records that this process has met and left out; each counts once, however often met."""

    MOST = 100_000  # that are told apart

    def __init__(self) -> None:
        self._found: set[str] = set()

    def add(self, where: str, found: Broken) -> None:
        if len(self._found) < self.MOST:
            self._found.add(f"{where}: {found.kind}")

    def found(self) -> list[str]:
        """Place and kind of each."""
        return sorted(self._found.copy())  # a loader's thread may be adding

    @staticmethod
    def describe(found: Sequence[str]) -> str:
        """How many, and the first of them."""
        least = "at least " if len(found) >= Skipped.MOST else ""
        return f"{least}{counted(len(found), 'broken record')} left out ({some(found)})"


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


def read_strictly(
    paths: Sequence[Path], format: RecordFormat, start: int, skipped: Skipped | None = None
) -> Iterator[Document]:
    """Documents of several files, numbered through; records before `start` are framed and not parsed.

    `skipped`: takes the broken records; None: the first raises ProblemsError.
    """
    first = 0  # index of the file's first record
    for path in paths:
        begin = start if len(paths) == 1 else 0  # within one file the format may skip faster than by reading
        index = first + begin - 1
        for index, raw in enumerate(format.frame(path, begin), first + begin):
            if index < start:
                continue
            found = raw if isinstance(raw, Broken) else format.parse(raw)
            if isinstance(found, Broken):
                left_out_or_refused(f"{found.file}:{found.number}", found, skipped)
            elif found:
                yield Document(index, found)
        first = index + 1


def left_out_or_refused(where: str, found: Broken, skipped: Skipped | None) -> None:
    """Give a broken record to `skipped`; raises ProblemsError without one."""
    if skipped is not None:
        skipped.add(where, found)
        return
    leave_out = Setting("data.broken_records", "skip")
    fix = (
        "mend it, leave such records out with ",
        leave_out,
        ", or keep them aside by launch/prepare_data.py",
    )
    raise ProblemsError([Problem("data.name", f"{where}: {found.kind}", found.detail, fix)])
