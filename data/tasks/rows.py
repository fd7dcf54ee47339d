"""Reader of texts to score a model on: rows of a local file or of a data set of the hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.text.file_types import looks_like
from data.text.hub import HubSource
from data.text.records import (
    MAX_RECORD_BYTES,
    BrokenRecord,
    RecordFormat,
    decode_payload,
)
from data.text.text_files import JsonlFormat, ParquetFormat, numbered_lines
from recipes import files
from recipes.problems import Key, ProblemsError, Words

FLAG = "--data"
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class Rows:
    """Texts in order, empty ones too, and descriptions of the broken rows."""

    source: str
    texts: tuple[str, ...]
    broken: tuple[str, ...]


def read_rows(
    place: Path | HubSource, column: str = "text", limit: int | None = None
) -> Rows:
    """Read the rows of a file (JSON lines, parquet, or text with a row on each line) or of the hub.

    `column`: of JSON lines, parquet and the hub; `limit`: rows to read. Raises ProblemsError: it cannot be
    read, or no row can be used.
    """
    texts = list[str]()
    broken = list[BrokenRecord]()
    for record in (
        _from_hub(place, column)
        if isinstance(place, HubSource)
        else _from_file(place, column)
    ):
        if isinstance(record, BrokenRecord):
            broken.append(record)
        else:
            texts.append(record)
        if len(texts) == limit:
            break
    if not any(text.strip() for text in texts):
        raise _refused(place, broken)
    source = place.name if isinstance(place, HubSource) else str(place)
    return Rows(source, tuple(texts), tuple(_said(each) for each in broken))


def read_whole(path: Path) -> str:
    """Read all of a text file. Raises ProblemsError: it cannot be read, is no UTF-8, or holds no text."""
    lines = list(_lines(path))
    broken = [line for line in lines if isinstance(line, BrokenRecord)]
    text = "".join(line for line in lines if isinstance(line, str))
    if broken or not text.strip():
        raise _refused(path, broken)
    return text


def is_plain_text(path: Path) -> bool:
    """Tell by name and beginning whether a file is neither JSON lines nor parquet."""
    return _format(path, "") is None


def local_file(text: str) -> Path:
    """Return the path of the flag's file. Raises ProblemsError: there is none."""
    path = files.path_of(text, FLAG)
    if not files.is_file(path):
        came = "is a directory" if path.is_dir() else "no such file"
        rule = f"{came} (seen from {Path.cwd()})"
        raise ProblemsError.of(
            FLAG, f"{FLAG} {text}", rule, "give a .jsonl, .parquet or text file"
        )
    return path


def _format(path: Path, column: str) -> RecordFormat | None:
    name = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    kind = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}.get(name.suffix)
    if not kind and (seen := looks_like(path)):
        kind = seen[1]
        if kind not in ("jsonl", "parquet"):
            came = f"{FLAG} {path} is {seen[0]}"
            fix = "give JSON lines, parquet or text"
            raise ProblemsError.of(FLAG, came, fix=fix)
    if kind == "jsonl":
        return JsonlFormat(column, MAX_RECORD_BYTES)
    return ParquetFormat(column, MAX_RECORD_BYTES) if kind == "parquet" else None


def _from_file(path: Path, column: str) -> Iterator[str | BrokenRecord]:
    """Yield the rows of a file; of plain text its lines, without line breaks."""
    form = _format(path, column)
    if form is None:
        for line in _lines(path):
            yield line if isinstance(line, BrokenRecord) else line.rstrip("\r\n")
    else:
        for raw in form.frame(path):
            yield raw if isinstance(raw, BrokenRecord) else form.parse(raw) or ""


def _lines(path: Path) -> Iterator[str | BrokenRecord]:
    for line in numbered_lines(path, MAX_RECORD_BYTES):
        yield line if isinstance(line, BrokenRecord) else decode_payload(line)


def _from_hub(source: HubSource, column: str) -> Iterator[str | BrokenRecord]:
    try:
        for record in replace(source, text_column=column).records():
            yield record if isinstance(record, BrokenRecord) else str(record.payload)
    except ProblemsError as error:
        fix = f"check the network, or give a copy with {FLAG} FILE (JSON lines, parquet or text)"
        told = [
            replace(each, key=FLAG, came=source.name, fix=fix)
            for each in error.problems
        ]
        raise ProblemsError(told) from error


def _refused(place: Path | HubSource, broken: Sequence[BrokenRecord]) -> ProblemsError:
    where = place.name if isinstance(place, HubSource) else f"{FLAG} {place}"
    if not broken:
        return ProblemsError.of(FLAG, where, "holds no text", "give a file with text")
    return ProblemsError.of(
        FLAG, where, f"no row can be used, the first: {_said(broken[0])}"
    )


def _said(found: BrokenRecord) -> str:
    """Describe a broken row by place and reason, with the flag of the column."""

    def show(words: Words) -> str:
        return "--column" if isinstance(words, Key) else str(words)

    return f"{found.file}:{found.number}: {found.render(show)}"
