"""Records, what files are cut into; documents, the texts in them; and what is said of broken ones.

A `RecordFormat` reads one kind of file in two steps. `frame` is cheap and sequential: it decompresses the
file and cuts it into records, in bounded memory. `parse` turns one record into a document's text and depends
on nothing else, so that worker processes share the work. Neither raises on bad input: a record that cannot be
used comes out as `Broken`.

Training reads strictly: a broken record stops the reader with its place, the reason and the fix. With
data.broken_records=skip it is counted and left out, like an empty document: it keeps its number, so that
every other document stays in its split. launch/prepare_data.py keeps such records aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recipes.problems import Key, Problem, ProblemsError, Setting, Text, Words, counted, pieces, some

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

        Raises ValueError: the file cannot be opened.
        """

    def parse(self, raw: Raw) -> str | Broken | None:
        """The document's text; None where the record is no document (empty, a redirect)."""

    def title(self, raw: Raw) -> str:
        """The document's title; "" where this kind of file has none."""
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

    Raises ProblemsError: by all but `fingerprint`, the dataset cannot be opened; by readers, a record is
    broken.
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
