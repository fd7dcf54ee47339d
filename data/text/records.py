"""Records of files, their documents, and reports of broken records.

A `RecordFormat` reads one kind of file in two steps. `records` is cheap and sequential: it decompresses the
file and cuts it into records, in bounded memory. `parse` turns one record into a document's text and depends
on nothing else, so that worker processes share the work. Neither raises on bad input: an unusable record
becomes a `BrokenRecord`.

Training reads strictly: a broken record stops the reader with its place, the reason and the fix. With
data.broken_records=skip it is counted and left out, like an empty document: it keeps its number, so that
every other document stays in its split. launch/prepare_data.py keeps such records aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from data.text.documents import Document, SkippedRecords
from data.text.file_types import JSON_LINES, JSON_LIST, SOURCES, looks_like, way_from
from recipes.problems import Key, Problem, ProblemsError, Setting, Text, Words, pieces

# a longer record is broken: no document of a corpus is that long
MAX_RECORD_BYTES = 64 << 20
EXCERPT_BYTES = 64 << 10

# of a file, by what the system says of it
VERSION = attrgetter("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
CHECKED_EVERY = 1024  # records of a file, after which it is looked at again

Payload = bytes | bytearray | str


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record of a file, decompressed and unparsed."""

    file: str
    number: int  # line, row, page or document, from 1, as a reader of the file counts
    payload: bytes | str


@dataclass(frozen=True, slots=True)
class BrokenRecord:
    """An unusable record, or the unreadable rest of a file."""

    file: str
    # as of RawRecord; for a damaged file the record after the last readable one
    number: int
    kind: str  # the cause in a few words; reports count records by it
    detail: Text  # more on this record, and the fix; "" where the kind says it all
    excerpt: bytes  # the beginning, at most 64 KiB
    size: int  # bytes of the whole record, decompressed; 0 where unknown

    @property
    def reason(self) -> str:
        """Kind and detail in one sentence."""
        return self.render()

    def render(self, show: Callable[[Words], str] = str) -> str:
        """Return the reason; `show` turns keys of a recipe into flags of the command."""
        return Problem("", self.kind, self.detail).render(show)


AnyRecord = RawRecord | BrokenRecord
# The text of a document; None: the record is no document (it is empty).
Parsed = str | BrokenRecord | None


class FoundFile(NamedTuple):
    """A file as it was when its name was looked up.

    `version`: device, inode, size, and the times in ns of the last change of its content, and of its content,
    names or rights, which is the system's own: nobody sets it back.
    """

    path: Path
    version: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.version[2]

    def check_unchanged(self) -> None:
        """Check that the path still leads to the same content. Raises ProblemsError.

        Of inode and last time one may differ: some file systems number a file anew, a new link sets the time.
        """
        then = self.version
        now = then[:0]
        with suppress(FileNotFoundError):
            now = VERSION(self.path.stat())
        one_inode = now[1:2] == then[1:2]
        one_time = now[4:] == then[4:]
        same = one_inode or one_time
        if same and now[2:4] == then[2:4]:
            return
        came = f"{self.path}: was changed, replaced or removed while it was read"
        rule = "documents are numbered and held out by their places in the files"
        raise ProblemsError.of(
            "data.name",
            came,
            rule,
            "put it back as it was, or begin anew with what is there now",
        )


class RecordFormat:
    """Reader of one kind of file; picklable and stateless."""

    source: ClassVar[str]  # its name in a recipe

    def records(self, path: Path) -> Iterator[AnyRecord]:
        """Yield the file's records in order, none of an empty file.

        Raises ValueError: the file cannot be opened.
        """
        raise NotImplementedError

    def frame(self, path: Path, start: int = 0) -> Iterator[AnyRecord]:
        """Yield the file's records in order, after the first `start`.

        A file that is empty or of another type is one broken record.
        """
        wrong = _another_type(path, self.source)
        if wrong:
            return iter([wrong][start:])
        return self.framed(path, start)

    def framed(self, path: Path, start: int) -> Iterator[AnyRecord]:
        """Do what `frame` does, for a file of this type."""
        records = self.records(path)
        first = next(records, None) or broken_record(path, 1, "empty file")
        return islice(chain([first], records), start, None)

    def parse(self, raw: RawRecord) -> Parsed:
        """Return the document of a record."""
        raise NotImplementedError

    def text_of(self, record: AnyRecord) -> Parsed:
        """Parse a record, unless it is broken."""
        return record if isinstance(record, BrokenRecord) else self.parse(record)


def broken_record(
    file: Path | str,
    number: int,
    kind: str,
    detail: Text = "",
    payload: Payload = b"",
    size: int = 0,
) -> BrokenRecord:
    """Make a `BrokenRecord` with the beginning of `payload` as its excerpt.

    Args:
        size: bytes of the record where `payload` is only its beginning.
    """
    if isinstance(payload, str):
        size = size or len(payload.encode("utf-8", "replace"))
        payload = payload[:EXCERPT_BYTES].encode("utf-8", "replace")
    return BrokenRecord(
        str(file),
        number,
        kind,
        detail,
        bytes(payload[:EXCERPT_BYTES]),
        size or len(payload),
    )


def _another_type(path: Path, source: str) -> BrokenRecord | None:
    """Return the reason why a file is not read by `source`; None: nothing speaks against it."""
    name = looks_like(path)
    if name is None:
        return None
    fitting = SOURCES.get(name)
    # which is text, too
    passing = source == "text" and name in (JSON_LINES, JSON_LIST)
    if fitting == source or passing:
        return None
    way: Text = (
        ("give ", Setting("data.source", fitting)) if fitting else way_from(name)
    )
    return broken_record(
        path, 1, "another type of file", (f"it is {name}; ", *pieces(way))
    )


def damaged_rest(path: Path, number: int, error: BaseException | str) -> BrokenRecord:
    """Make a `BrokenRecord` for the unreadable rest of a file."""
    return broken_record(
        path,
        number,
        "damaged file",
        f"cannot be read to its end ({error}): it is cut off or damaged; fetch it again",
    )


def oversized_record(
    path: Path, number: int, payload: Payload, size: int, limit: int, hint: Text = ""
) -> BrokenRecord:
    """Make a `BrokenRecord` for an oversized record of `size` bytes, with `payload` at its beginning."""
    detail = (f"{size:,} bytes where a record has at most {limit:,}", *pieces(hint))
    return broken_record(path, number, "too large", detail, payload, size)


def decode_payload(raw: AnyRecord) -> str | BrokenRecord:
    """Decode a payload to text without a byte-order mark, or report it as broken."""
    if isinstance(raw, BrokenRecord):
        return raw
    text = raw.payload
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            return unusable_record(
                raw,
                "invalid UTF-8",
                f"{error.reason} at byte {error.start} of the record",
            )
    if "\0" in text:
        return unusable_record(
            raw,
            "NUL bytes",
            f"{text.count(chr(0))}, the first at character {text.index(chr(0))}",
        )
    return text.removeprefix("\ufeff")


def field_text(record: Any, column: str, raw: RawRecord) -> Parsed:
    """Return the text field of a parsed record, or report it as broken; None where it is empty."""
    if not isinstance(record, dict):
        return unusable_record(
            raw,
            "no JSON object",
            f"a JSON {type(record).__name__} where an object with a text field is needed",
        )
    if column not in record:
        return unusable_record(
            raw, f"no field {column!r}", choose_column(sorted(map(str, record))[:20])
        )
    text = record[column]
    if not isinstance(text, str):
        return unusable_record(
            raw,
            f"field {column!r} is {type(text).__name__}, not a string",
            choose_column(()),
        )
    if "\0" in text:
        return unusable_record(
            raw, "NUL bytes", f"{text.count(chr(0))} in field {column!r}"
        )
    # Lone surrogates, which JSON can carry and UTF-8 cannot, become '?'.
    return (
        text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
    ) or None


def choose_column(names: Sequence[str]) -> Text:
    """Word the fix for a record with its text in another field."""
    which = f"one of {', '.join(names)}" if names else "the text field"
    return "set ", Key("data.text_column"), f" to {which}"


def unusable_record(raw: RawRecord, kind: str, detail: Text) -> BrokenRecord:
    """Make a `BrokenRecord` for an unusable record."""
    return broken_record(raw.file, raw.number, kind, detail, raw.payload)


def read_strictly(
    files: Sequence[FoundFile],
    format: RecordFormat,
    start: int,
    skipped: SkippedRecords | None = None,
) -> Iterator[Document]:
    """Yield the documents of several files, numbered through; do not parse the records before `start`.

    `skipped`: collects the broken records; None: the first raises ProblemsError. So does a file that is
    changed meanwhile.
    """
    first = 0  # index of the file's first record
    for file in files:
        # within one file the format may skip faster than by reading
        begin = start if len(files) == 1 else 0
        index = first + begin - 1
        for index, raw in enumerate(format.frame(file.path, begin), first + begin):
            if (index - first) % CHECKED_EVERY == 0:
                file.check_unchanged()
            if index < start:
                continue
            parsed = format.text_of(raw)
            if isinstance(parsed, BrokenRecord):
                file.check_unchanged()
                skip_or_refuse(f"{parsed.file}:{parsed.number}", parsed, skipped)
            elif parsed:
                yield Document(index, parsed)
        file.check_unchanged()
        first = index + 1


def skip_or_refuse(
    where: str, record: BrokenRecord, skipped: SkippedRecords | None
) -> None:
    """Give a broken record to `skipped`; raises ProblemsError without one."""
    if skipped:
        skipped.add(where, record.kind)
        return
    leave_out = Setting("data.broken_records", "skip")
    fix = (
        "mend it, leave such records out with ",
        leave_out,
        ", or keep them aside by launch/prepare_data.py",
    )
    raise ProblemsError.of("data.name", f"{where}: {record.kind}", record.detail, fix)
