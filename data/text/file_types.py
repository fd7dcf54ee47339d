"""The type of a file by its first bytes, for commands that are handed files of any kind."""

from __future__ import annotations

from pathlib import Path

from data.text.text_files import READ_ERRORS, open_decompressed

_MARKS: tuple[tuple[bytes, tuple[str, str | None]], ...] = (
    (b"PAR1", ("a parquet file", "parquet")),
    (b"PK\x03\x04", ("a zip archive", None)),
    (b"SQLite format 3", ("an SQLite database", None)),
    (b"%PDF", ("a PDF", None)),
    (b"MMIDIDX", ("the index of a token store", "store")),
    (b"\xff\xfe", ("UTF-16", None)),
    (b"\xfe\xff", ("UTF-16", None)),
    (b"\x7fELF", ("a program", None)),
)


def looks_like(path: Path) -> tuple[str, str | None] | None:
    """Guess a file's type from its beginning: (type, its source, if any); None where it shows no type.

    Only unmistakable types: marks of file types, JSON lines and XML dumps.
    """
    try:
        with open_decompressed(path) as file:
            head = file.read(4096)
    except (*READ_ERRORS, ValueError):
        return None
    for mark, found in _MARKS:
        if head.startswith(mark):
            return found
    if head[257:262] == b"ustar":
        return "a tar archive", None
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"<mediawiki"):
        return "a Wikipedia dump", "wikipedia"
    if text.startswith(b"["):
        return "one JSON list and not an object per line", None
    if text.startswith(b"{") and (text[1:].lstrip().startswith(b'"') or text.startswith(b"{}")):
        return "JSON lines", "jsonl"
    return None
