"""Records: what files are cut into, and what is kept of those that are broken.

A `RecordFormat` reads one kind of file in two steps. `frame` is cheap and sequential: it decompresses the
file and cuts it into records, with bounded memory. `parse` turns one record into the text of a document and
depends on nothing else, so that worker processes can share the work. Neither raises on bad input: a record
that cannot be used comes out as `Broken`.

What `frame` yields is numbered by position from 0: `frame(path, start)` yields the items of `frame(path)`
from `start` on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recipes.problems import Key, Problem, Text, Words, pieces

MAX_RECORD_BYTES = 64 << 20  # a longer record is broken: no document of a corpus is that long
EXCERPT_BYTES = 64 << 10

Payload = bytes | bytearray | str


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
    kind: str  # why, in the few words that a report counts by
    detail: Text  # of this record, and the fix; "" where the kind says it all
    excerpt: bytes  # the beginning, at most 64 KiB
    size: int  # bytes of the whole record, decompressed; 0 where unknown

    @property
    def reason(self) -> str:
        """Kind and detail in one sentence."""
        return self.render()

    def render(self, show: Callable[[Words], str] = str) -> str:
        """The reason. `show` turns keys of a recipe into what this command's user types."""
        return Problem("", self.kind, self.detail).render(show)


class RecordFormat(Protocol):
    """One kind of file. Picklable, and without state."""

    def frame(self, path: Path, start: int = 0) -> Iterator[Raw | Broken]:
        """The file's records in order, after the first `start` ones.

        Raises:
            ValueError: the file cannot be opened.
        """

    def parse(self, raw: Raw) -> str | Broken | None:
        """The document's text; None where the record is no document (empty, a redirect)."""

    def title(self, raw: Raw) -> str:
        """The document's title; "" where this kind of file has none."""


class Untitled:
    """Formats whose records have no titles."""

    def title(self, raw: Raw) -> str:
        return ""


def broken(
    file: Path | str, number: int, kind: str, detail: Text = "", payload: Payload = b"", size: int = 0
) -> Broken:
    """A `Broken` with the beginning of `payload`.

    Args:
        size: bytes of the record where `payload` is only its beginning.
    """
    if isinstance(payload, str):
        size = size or len(payload.encode("utf-8", "replace"))
        payload = payload[:EXCERPT_BYTES].encode("utf-8", "replace")
    return Broken(str(file), number, kind, detail, bytes(payload[:EXCERPT_BYTES]), size or len(payload))


def damaged(path: Path, number: int, error: BaseException | str) -> Broken:
    """What stands for the rest of a file that cannot be read on."""
    detail = f"cannot be read to its end ({error}): it is cut off or damaged; fetch it again"
    return broken(path, number, "damaged file", detail)


def too_large(path: Path, number: int, payload: Payload, size: int, limit: int, hint: Text = "") -> Broken:
    """What stands for a record of `size` bytes that begins with `payload`."""
    detail = (f"{size:,} bytes where a record has at most {limit:,}", *pieces(hint))
    return broken(path, number, "too large", detail, payload, size)


def decoded(raw: Raw) -> str | Broken:
    """The payload as text without a byte-order mark, or why it is none."""
    text = raw.payload
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            return unusable(raw, "invalid UTF-8", f"{error.reason} at byte {error.start} of the record")
    if "\0" in text:
        where = f"the first at character {text.index(chr(0))}"
        return unusable(raw, "NUL bytes", f"{text.count(chr(0))}, {where}")
    return text.removeprefix("\ufeff")


def field_text(record: Any, column: str, raw: Raw) -> str | Broken | None:
    """The document in a parsed record; None where it is empty."""
    if not isinstance(record, dict):
        kind = f"a JSON {type(record).__name__} where an object with a text field is needed"
        return unusable(raw, "no JSON object", kind)
    if column not in record:
        return unusable(raw, f"no field {column!r}", choose_column(sorted(map(str, record))[:20]))
    if not isinstance(text := record[column], str):
        return unusable(raw, f"field {column!r} is {type(text).__name__}, not a string", choose_column(()))
    if "\0" in text:
        return unusable(raw, "NUL bytes", f"{text.count(chr(0))} in field {column!r}")
    # Lone surrogates, which JSON can carry and UTF-8 cannot, become '?'.
    return (text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")) or None


def choose_column(names: Sequence[str]) -> Text:
    """The fix where a record has its text in another field than the one that is read."""
    which = f"one of {', '.join(names)}" if names else "the text field"
    return "set ", Key("data.text_column"), f" to {which}"


def unusable(raw: Raw, kind: str, detail: Text = "") -> Broken:
    """What stands for a record that is there and cannot be used."""
    return broken(raw.file, raw.number, kind, detail, raw.payload)
