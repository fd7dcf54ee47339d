"""Records: what files are cut into, and what is kept of those that are broken.

A `RecordFormat` reads one kind of file in two steps. `frame` is cheap and sequential: it decompresses the file and cuts it
into records, with bounded memory. `parse` turns one record into the text of a document and depends on nothing else, so
that worker processes can share the work. Neither raises on bad input: a record that cannot be used comes out as `Broken`.

What `frame` yields is numbered by position from 0: `frame(path, start)` yields the items of `frame(path)` from `start` on.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recipes.schema import Origin

MAX_RECORD_BYTES = 64 << 20  # a longer record is broken: no document of a corpus is that long
EXCERPT_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Raw:
    """One record as it stands in its file, decompressed."""

    file: str
    number: int  # line, row, page or document, from 1, as a reader of the file counts
    payload: bytes | str


@dataclass(frozen=True, slots=True)
class Broken:
    """A record that cannot be used, or a file (its rest) that cannot be read."""

    file: str
    number: int  # as of Raw; for a damaged file the record after the last readable one
    reason: str  # "KIND" or "KIND: details and fix"; there are few kinds
    excerpt: bytes  # the beginning, at most 64 KiB
    size: int  # bytes of the whole record, decompressed; 0 where unknown

    @property
    def kind(self) -> str:
        """The reason without its details: what a report counts."""
        return self.reason.partition(":")[0]


class RecordFormat(Protocol):
    """One kind of file. Picklable, and without state."""

    def frame(self, path: Path, start: int = 0) -> Iterator[Raw | Broken]:
        """The file's records in order, after the first `start` ones.

        Raises:
            ValueError: the file cannot be opened.
        """
        ...

    def parse(self, raw: Raw) -> str | Broken | None:
        """The document's text; None where the record is no document (empty, a redirect)."""
        ...


def format_of(origin: Origin, max_record_bytes: int = MAX_RECORD_BYTES) -> RecordFormat:
    """The format of a source's files. Not for `hub` and `store`, which are not read as files.

    Args:
        max_record_bytes: longer records are broken; they are passed over in pieces.
    """
    from data.sources.formats.text_files import JsonlFormat, ParquetFormat, TextFormat
    from data.sources.formats.wikipedia import WikipediaFormat

    if origin.source == "packaged":
        return TextFormat("file", max_record_bytes)
    if origin.source == "jsonl":
        return JsonlFormat(origin.text_column, max_record_bytes)
    if origin.source == "parquet":
        return ParquetFormat(origin.text_column, max_record_bytes)
    if origin.source == "text":
        return TextFormat(origin.documents, max_record_bytes)
    assert origin.source == "wikipedia", f"data.source={origin.source} is not read as files"
    return WikipediaFormat(max_record_bytes)


def files_of(origin: Origin) -> list[Path]:
    """The files of a source, sorted by path.

    Raises:
        ValueError: there are none, or the name is a directory.
    """
    if origin.source == "packaged":
        from data.sources.documents import packaged_files

        return packaged_files()
    assert origin.name is not None, "the schema demands a name"
    literal = Path(origin.name).expanduser()
    if literal.is_dir():
        suffix = {
            "jsonl": "*.jsonl",
            "parquet": "*.parquet",
            "text": "*.txt",
            "wikipedia": "*pages-articles*.xml*.bz2",
        }[origin.source]
        raise ValueError(
            f"data.name={origin.name} is a directory: name the files in it, e.g. {literal / suffix}"
        )
    names = [str(literal)] if literal.exists() else glob.glob(str(literal), recursive=True)
    paths = [Path(name) for name in sorted(names) if not Path(name).is_dir()]
    if not paths:
        raise ValueError(
            f"data.name={origin.name}: no such file (seen from {Path.cwd()}): give the path or a glob of {origin.source} files"
        )
    return paths


def broken(
    file: Path | str, number: int, reason: str, payload: bytes | str = b"", size: int | None = None
) -> Broken:
    """A `Broken` with the beginning of `payload`.

    Args:
        size: bytes of the record where `payload` is only its beginning.
    """
    if isinstance(payload, str):
        size = len(payload.encode("utf-8", "replace")) if size is None else size
        payload = payload[:EXCERPT_BYTES].encode("utf-8", "replace")
    return Broken(
        str(file), number, reason, bytes(payload[:EXCERPT_BYTES]), len(payload) if size is None else size
    )


def decoded(raw: Raw) -> str | Broken:
    """The payload as text without a byte-order mark, or why it is none."""
    text = raw.payload
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            return broken(
                raw.file,
                raw.number,
                f"invalid UTF-8: {error.reason} at byte {error.start} of the record",
                raw.payload,
            )
    if "\0" in text:
        return broken(
            raw.file,
            raw.number,
            f"NUL bytes: {text.count(chr(0))}, the first at character {text.index(chr(0))}",
            raw.payload,
        )
    return text.removeprefix("\ufeff")


def clean_unicode(text: str) -> str:
    """The text with lone surrogates, which JSON can carry and UTF-8 cannot, replaced by '?'."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
