"""Text that a user names by a path alone: the keys of a recipe that read it, and what a plan says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.text.file_types import type_of, way_from
from data.text.records import BrokenRecord, read_strictly
from data.text.sources import files_of, format_of
from data.text.text_files import numbered_lines
from recipes.problems import Problem, ProblemsError, Setting, counted, some
from recipes.schema import Origin

COLUMNS = ("text", "content")  # of a document, by their usual names
_SHOWN = 5  # files of each problem


def text_settings(
    text: str, column: str | None = None, flag: str = "--text"
) -> dict[str, Any]:
    """Return dotted keys of a recipe, and their values, for the text in a file, a directory or a glob.

    `column`: the one that the user stated. Raises ProblemsError: there is no text, text of several kinds, or
    no column that is surely the text.
    """
    where = f"{flag} {text}"
    try:
        files = files_of(Origin(source="text", name=text))
        source = _source_of(text, files)
        if column is None and source != "text":
            column = _column_of(files)
        stated = {"text_column": column} if column else {}
        origin = Origin.model_validate({"source": source, "name": text, **stated})
        # its first record is sound
        next(read_strictly(files[:1], format_of(origin), 0), None)
    except ProblemsError as error:
        raise ProblemsError(
            replace(problem, where=where) for problem in error.problems
        ) from error
    names = ("source", "name", "text_column", "config", "revision", "streaming")
    return {
        "data.blend": [],
        **{f"data.{name}": getattr(origin, name) for name in names},
    }


def _source_of(text: str, files: Sequence[Path]) -> Any:
    """Return the one source that reads all files. Raises ProblemsError."""
    by_type: dict[str, list[str]] = {}
    sources: dict[str, str | None] = {}
    for file in files:
        name, source = type_of(file)
        sources[name] = source
        by_type.setdefault(name, []).append(str(file))
    problems = []
    for name, paths in by_type.items():
        if sources[name] == "store":
            fix = f"train from it with --set data.source=store --set data.name={text}"
            raise ProblemsError(
                [Problem("--text", "is a token store, and no text", fix=fix)]
            )
        if sources[name] is None:
            fix = way_from(name).replace("FILE", paths[0])
            problems.append(
                Problem(
                    "--text", f"{some(paths, _SHOWN)}: {name}", "it is not read", fix
                )
            )
    if problems:
        raise ProblemsError(problems)
    if len(by_type) > 1:
        kinds = " and ".join(
            f"{name} ({some(paths, 2)})" for name, paths in by_type.items()
        )
        globs = " or ".join(
            f"'{text}/**/*{Path(paths[0]).suffix}'" for paths in by_type.values()
        )
        raise ProblemsError(
            [
                Problem(
                    "--text",
                    f"holds {kinds}",
                    "text is of one kind",
                    f"name one by a glob: {globs}",
                )
            ]
        )
    return next(iter(sources.values()))


def _column_of(files: Sequence[Path]) -> str:
    """Return the column with the text, by the first record of the first file. Raises ProblemsError."""
    columns, texts = _columns(files[0])
    usual = [name for name in COLUMNS if name in texts]
    chosen = usual or texts
    if usual or len(texts) == 1 or not columns:
        return chosen[0] if chosen else COLUMNS[0]
    came = f"{files[0]} has the columns {some(columns, 20)}"
    rule = f"none is called {' or '.join(COLUMNS)}, and {counted(len(texts), 'column')} of them hold text"
    fix = ("set ", Setting("data.text_column", (texts or columns)[0]), " or another")
    raise ProblemsError([Problem("data.text_column", came, rule, fix)])


def _columns(file: Path) -> tuple[list[str], list[str]]:
    """Return all columns of a file's first record, and those with text; none where it cannot be read."""
    if type_of(file)[1] == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(file)
        except (pa.ArrowException, OSError):
            return [], []
        return schema.names, [
            each.name for each in schema if "string" in str(each.type)
        ]
    lines = (line for line in numbered_lines(file, 64 << 20))
    first = next(
        (
            line
            for line in lines
            if isinstance(line, BrokenRecord) or line.payload.strip()
        ),
        None,
    )
    try:
        record = json.loads(getattr(first, "payload", ""))
    except (ValueError, RecursionError):
        return [], []
    if not isinstance(record, dict):
        return [], []
    return [*record], [name for name, value in record.items() if isinstance(value, str)]
