"""Readers of JSON lines, parquet, plain text and compressed files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from data.text.file_types import BUFFER, READ_ERRORS, open_decompressed, open_file
from data.text.records import (
    EXCERPT_BYTES,
    MAX_RECORD_BYTES,
    AnyRecord,
    BrokenRecord,
    Parsed,
    RawRecord,
    RecordFormat,
    broken_record,
    choose_column,
    damaged_rest,
    decode_payload,
    field_text,
    oversized_record,
    unusable_record,
)
from recipes.problems import Setting, Text

# types of Arrow; views are Polars'
_TEXTS = re.compile(r"(dictionary<values=)?(large_)?(string|binary)(_view)?\b")


@dataclass(frozen=True)
class JsonlFormat(RecordFormat):
    """One JSON object per line. Blank lines are no records."""

    source = "jsonl"
    text_column: str = "text"
    max_record_bytes: int = MAX_RECORD_BYTES

    def records(self, path: Path) -> Iterator[AnyRecord]:
        lines = numbered_lines(path, self.max_record_bytes)
        return (
            line
            for line in lines
            if isinstance(line, BrokenRecord) or line.payload.strip()
        )

    def parse(self, raw: RawRecord) -> Parsed:
        text = decode_payload(raw)
        if isinstance(text, BrokenRecord):
            return text
        try:
            record = json.loads(text)
        # RecursionError: brackets nested by the thousand
        except (ValueError, RecursionError) as error:
            return unusable_record(
                raw, "not a JSON object", f"{error}: every line must be one"
            )
        return field_text(record, self.text_column, raw)


@dataclass(frozen=True)
class TextFormat(RecordFormat):
    """Plain text; a document is a whole file, or a block between blank lines."""

    source = "text"
    documents: Literal["file", "blank_line"] = "file"
    max_record_bytes: int = MAX_RECORD_BYTES

    def records(self, path: Path) -> Iterator[AnyRecord]:
        if self.documents == "file":
            return self._whole(path)
        return self._blocks(path)

    def _whole(self, path: Path) -> Iterator[AnyRecord]:
        limit = self.max_record_bytes
        try:
            with open_decompressed(path) as file:
                content = file.read(limit + 1)
                size = len(content)
                while piece := size > limit and file.read(BUFFER):
                    size += len(piece)
        except READ_ERRORS as error:
            yield damaged_rest(path, 1, error)
            return
        if size > limit:
            hint = (
                "; a file of many documents needs ",
                Setting("data.documents", "blank_line"),
            )
            yield oversized_record(path, 1, content, size, limit, hint)
        elif content:
            yield RawRecord(str(path), 1, content)

    def _blocks(self, path: Path) -> Iterator[AnyRecord]:
        """Yield the blocks of lines, numbered by their first lines."""
        block = bytearray()
        first = 0
        size = 0
        for line in numbered_lines(path, self.max_record_bytes):
            if isinstance(line, BrokenRecord):  # of size 0: the file cannot be read on
                content = line.excerpt
                length = line.size
            else:
                assert isinstance(line.payload, bytes)
                content = line.payload
                length = len(line.payload) if line.payload.strip() else 0
            if length:
                first = first if size else line.number
                size += length
                block += content
                del block[
                    EXCERPT_BYTES
                    if size > self.max_record_bytes
                    else self.max_record_bytes :
                ]
                continue
            if size:
                yield self._block(path, first, block, size)
                block = bytearray()
                size = 0
            if isinstance(line, BrokenRecord):
                yield line
        if size:
            yield self._block(path, first, block, size)

    def _block(self, path: Path, number: int, block: bytearray, size: int) -> AnyRecord:
        if size > self.max_record_bytes:
            return oversized_record(path, number, block, size, self.max_record_bytes)
        return RawRecord(str(path), number, bytes(block))

    def parse(self, raw: RawRecord) -> Parsed:
        text = decode_payload(raw)
        if isinstance(text, BrokenRecord):
            return text
        text = text.replace("\r\n", "\n")
        return text if text.strip() else None


@dataclass(frozen=True)
class ParquetFormat(RecordFormat):
    """One document per row. Only the text column is read, in batches within a row group."""

    source = "parquet"
    text_column: str = "text"
    # of one row; a longer one is read by pyarrow and then refused
    max_record_bytes: int = MAX_RECORD_BYTES
    batch_rows: int = 256

    def framed(self, path: Path, start: int) -> Iterator[AnyRecord]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER)
        except (pa.ArrowException, OSError) as error:
            with open_file(path) as opened:
                mark = opened.read(4)
            broken = damaged_rest(path, 1, error)
            if not mark:
                broken = broken_record(path, 1, "empty file")
            elif mark != b"PAR1":
                rule = "a parquet file begins with PAR1"
                broken = broken_record(path, 1, "another type of file", rule)
            yield from [broken][start:]
            return
        with file:
            yield from self._rows(file, path, start)

    def _rows(self, file: Any, path: Path, start: int) -> Iterator[AnyRecord]:
        import pyarrow as pa

        problem = self._column_problem(file)
        first = 0  # row at which the group begins
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            row = max(first, start)
            end = first + rows
            first = end
            if row >= end:
                continue
            reason = problem
            if not reason:
                try:
                    for value in islice(
                        self._values(file, group), rows - (end - row), None
                    ):
                        row += 1
                        yield self._record(path, row, value)
                except (pa.ArrowException, OSError) as error:
                    rule = f"row group {group} cannot be read ({error}): fetch the file again"
                    reason = ("damaged file", rule)
            # Every row that is lost is counted, so that a report knows the share.
            if reason:
                yield from (
                    broken_record(path, number, *reason)
                    for number in range(row + 1, end + 1)
                )

    def _column_problem(self, file: Any) -> tuple[str, Text] | None:
        """Return (kind, detail) of a fault of the column in every row; None for a sound column."""
        schema = file.schema_arrow
        count = schema.names.count(self.text_column)
        if count > 1:
            return f"{count} fields {self.text_column!r}", "give files with one of them"
        if not count:
            return f"no field {self.text_column!r}", choose_column(sorted(schema.names))
        kind = schema.field(self.text_column).type
        if not _TEXTS.match(str(kind)):
            return f"field {self.text_column!r} is {kind}, not a string", choose_column(
                ()
            )
        return None

    def _values(self, file: Any, group: int) -> Iterator[bytes | None]:
        """Yield the column's values as bytes: pyarrow does not check that a string column is UTF-8."""
        import pyarrow as pa

        which = dict(row_groups=[group], columns=[self.text_column])
        for batch in file.iter_batches(self.batch_rows, **which, use_threads=False):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            yield from column.cast(pa.large_binary()).to_pylist()

    def _record(self, path: Path, row: int, value: bytes | None) -> AnyRecord:
        if value is None:
            return broken_record(
                path, row, f"field {self.text_column!r} is null, not a string"
            )
        if len(value) > self.max_record_bytes:
            return oversized_record(path, row, value, len(value), self.max_record_bytes)
        return RawRecord(str(path), row, value)

    def parse(self, raw: RawRecord) -> Parsed:
        return decode_payload(raw) or None


def numbered_lines(path: Path, limit: int) -> Iterator[AnyRecord]:
    """Yield the file's lines, decompressed and numbered from 1; a line over `limit` as a `BrokenRecord`.

    Where the file cannot be read on, the last item is a `BrokenRecord` of size 0.
    """
    number = 0
    try:
        with open_decompressed(path) as file:
            while line := file.readline(limit + 1):
                number += 1
                if len(line) > limit and not line.endswith(b"\n"):
                    size = len(line)
                    line = line[:EXCERPT_BYTES]
                    while piece := file.readline(BUFFER):
                        size += len(piece)
                        if piece.endswith(b"\n"):
                            break
                    yield oversized_record(path, number, line, size, limit)
                else:
                    yield RawRecord(str(path), number, line)
    except READ_ERRORS as error:
        yield damaged_rest(path, number + 1, error)
