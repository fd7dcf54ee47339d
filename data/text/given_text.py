"""Text that a user names by a path alone: the keys of a recipe that read it, and what a plan says of it."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from data.durable_files import Say, now_and_then, quiet
from data.text.file_types import SOURCES, type_of, way_from
from data.text.listing import splits_of
from data.text.local_files import files_of, format_of, named_path
from data.text.records import FoundFile, read_strictly
from data.text.text_files import JsonlFormat
from recipes.files import named_kind, nested
from recipes.problems import Key, Problem, ProblemsError, Setting, Words, either, some
from recipes.schema import Origin

COLUMNS = ("text", "content")  # of a document, by their usual names
_SHOWN = 5  # files of each problem
_RECORDS = 20  # of a file, by which its column is chosen
_LEAST_TEXT = (
    80  # bytes of a document, in the mean, where the column's name says nothing
)
_WITHOUT_TEXT: tuple[Words, ...] = (
    "name the column with ",
    Key("data.text_column"),
    " if one is the text, other files by a glob, or give each record a field text, as jq -c '{text: ...}' does",
)
_OF_TEXT = re.compile(
    "(text|content|body|article|document|passage|sentence|story|abstract|review)s?$",
    re.IGNORECASE,
)


def text_settings(
    text: str, column: str | None = None, say: Say = quiet
) -> dict[str, Any]:
    """Return dotted keys of a recipe, and their values, for the text in a file, a directory or a glob.

    `column`: the one that the user stated; `say` gets lines of progress. Raises ProblemsError: there is no
    text, text of several kinds or splits, or no column that is surely the text.
    """
    where = f"--text {text}"
    try:
        origin = Origin(source="text", name=text)
        files = files_of(origin, say)
        if named_path(origin)[0].is_dir():
            _check_splits(text, files)
        source = _source_of(text, files, say)
        first = files[:1]
        if source != "text":
            by_folder = {file.path.parent: file for file in reversed(files)}
            first = sorted(by_folder.values())
            columns = [column or _column_of(file.path) for file in first]
            column = columns[0]
        origin = Origin(source=source, name=text, text_column=column or COLUMNS[0])
        for file in first:  # their first records are sound
            next(read_strictly([file], format_of(origin), 0), None)
    except ProblemsError as error:
        raise ProblemsError(
            replace(problem, where=where) for problem in error.problems
        ) from error
    names = ("source", "name", "text_column", "config", "revision", "streaming")
    return {
        "data.blend": [],
        **{f"data.{name}": getattr(origin, name) for name in names},
    }


def _check_splits(text: str, files: Sequence[FoundFile]) -> None:
    """Refuse a directory with files of several splits. A glob states what is trained on."""
    splits = splits_of(files)
    if not splits:
        return
    every = f"{glob.escape(text.rstrip('/'))}/**/*"
    word = next(word for word in splits if word.lower().startswith("train"))
    inside = "" if word in splits[word].name else "/**/*"
    came = f"holds files named {' and '.join(splits)}"
    rule = "a test of what a model was trained on says nothing"
    raise ProblemsError.of(
        "--text",
        came,
        rule,
        f"name one split by a glob, as '{every}{word}*{inside}', or all: '{every}'",
    )


def _source_of(text: str, files: Sequence[FoundFile], say: Say) -> Any:
    """Return the one source that reads all files. Raises ProblemsError."""
    kinds: dict[str, list[str]] = {}
    tell = now_and_then(say)
    for number, file in enumerate(files, 1):
        kinds.setdefault(type_of(file.path), []).append(str(file.path))
        tell(f"{text}: looked into {number:,} of {len(files):,} files")
    problems = []
    for name, paths in kinds.items():
        source = SOURCES.get(name)
        if source == "store":
            fix = f"train from it with --set data.source=store --set data.name={text}"
            raise ProblemsError.of("--text", "is a token store, and no text", fix=fix)
        if source is None:
            came = f"{some(paths, _SHOWN)}: {name}"
            fix = way_from(name).replace("FILE", paths[0])
            problems.append(Problem("--text", came, "it is not read", fix))
    if not problems and len(kinds) > 1:
        told = [f"{name} ({some(paths, 2)})" for name, paths in kinds.items()]
        globs = [f"'{text}/**/*{Path(paths[0]).suffix}'" for paths in kinds.values()]
        fix = f"name one by a glob: {either(globs)}"
        came = f"holds {' and '.join(told)}"
        problems.append(Problem("--text", came, "text is of one kind", fix))
    if problems:
        raise ProblemsError(problems)
    return SOURCES[next(iter(kinds))]


def _column_of(file: Path) -> str:
    """Return the column with the text of a file's first records. Raises ProblemsError: none surely is."""
    values: dict[str, list[Any]] = {}
    texts: dict[str, list[str]] = {}
    for record in _first_records(file):
        for name, value in record.items():
            values.setdefault(name, []).append(value)
            if isinstance(value, str):
                texts.setdefault(name, []).append(value)
    for name in COLUMNS:
        first, *_ = values.get(name, [0])
        # its reader says what is wrong, here and where nothing can be read
        if not values or isinstance(first, str | bytes | None):
            return name
    others = _characters(values) - _characters(texts)
    likely = [name for name, own in texts.items() if _is_text(name, own, others)]
    if len(texts) == len(likely) == 1:
        return likely[0]
    kinds = [f"{name} ({named_kind(own[0])})" for name, own in values.items()]
    came = f"{file} has the columns {some(kinds, 20)}"
    rule = (
        f"none is called {' or '.join(COLUMNS)}, or surely is the text by what it holds"
    )
    fix = _WITHOUT_TEXT
    if likely:
        best = max(likely, key=lambda name: _characters(texts[name]))
        fix = (
            "set ",
            Setting("data.text_column", best),
            " if that is the text, or ",
            *fix,
        )
    raise ProblemsError.of("data.text_column", came, rule, fix)


def _is_text(name: str, values: Sequence[str], others: int) -> bool:
    """Tell by its name, or else by its values, whether a column is the text of documents.

    `others`: characters in lists and objects of the same records. Ids, addresses and titles have no blanks, or
    are short; letters beyond ASCII may do without blanks.
    """
    in_words = [value for value in values if not value.isascii() or " " in value]
    size = sum(len(value.encode("utf-8", "replace")) for value in in_words)
    long = size >= _LEAST_TEXT * len(values) and size >= others
    return long or bool(_OF_TEXT.search(name))


def _characters(value: Any) -> int:
    """Count the characters of all texts in a value, but for keys."""
    return sum(len(each) for each in nested(value) if isinstance(each, str))


def _first_records(file: Path) -> list[dict[str, Any]]:
    """Return the first records of a file, none where it cannot be read."""
    if SOURCES.get(type_of(file)) == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        with suppress(pa.ArrowException, OSError), pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_RECORDS):
                return batch.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types
        return []
    records = []
    for line in islice(JsonlFormat().records(file), _RECORDS):
        with suppress(ValueError, RecursionError):
            records.append(json.loads(getattr(line, "payload", "")))
    return [record for record in records if isinstance(record, dict)]
