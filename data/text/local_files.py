"""Files as a source of documents: JSON lines, parquet, plain text, and those of the packaged corpus."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from data.durable_files import Say, quiet
from data.text import listing
from data.text.documents import Document, SkippedRecords
from data.text.file_types import ARROW, way_from
from data.text.packaged import speeches
from data.text.records import (
    MAX_RECORD_BYTES,
    VERSION,
    FoundFile,
    RecordFormat,
    read_strictly,
)
from data.text.text_files import JsonlFormat, ParquetFormat, TextFormat
from recipes import files
from recipes.problems import ProblemsError, Setting
from recipes.schema import Origin


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
        raise ProblemsError.of(
            "data.name",
            Setting("data.name", origin.name),
            str(error),
            "give another path",
        ) from error


def files_of(origin: Origin, say: Say = quiet) -> list[FoundFile]:
    """List the files of a source, sorted by path, each once.

    A directory stands for all files in it and below it. `say` gets what is told of many files. Raises
    ProblemsError: there are none.
    """
    if origin.source == "packaged":
        return [FoundFile(path, VERSION(path.stat())) for path in speeches()]
    named = Setting("data.name", origin.name)
    path, found = named_path(origin)
    paths = listing.find(path, say)
    if path.is_dir() and any(file.path.suffix == ".arrow" for file in paths):
        rule = f"it is a directory with {ARROW}"
        raise ProblemsError.of("data.name", named, rule, way_from(ARROW))
    if not paths:
        fix = f"give the path or a glob of {origin.source} files"
        rule = (
            "the directory holds no file"
            if found
            else f"no such file (seen from {Path.cwd()})"
        )
        raise ProblemsError.of("data.name", named, rule, fix)
    return paths


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
        if skipped:
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
