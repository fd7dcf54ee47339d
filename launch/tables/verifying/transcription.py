"""Transcription: the printed lines of a table are those that were compared with the document.

A number that nothing recomputes could be changed in its cell and its key together without a contradiction. A digest of each table's
printed lines (recipes/checks/transcription.yaml) says that a line was changed, not that it was read rightly. After comparing a changed
table with its document, the digest that `recipes.py verify` computes goes into the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.tables.verifying.check import Check, compared
from launch.tables.verifying.rows import Row
from recipes.tables import FOLDER, Table
from recipes.yaml_lines import read

TRANSCRIPTION = FOLDER / "checks" / "transcription.yaml"


def load(path: Path = TRANSCRIPTION) -> dict[str, str]:
    """Digest of each table, by its name.

    Raises:
        YamlError: malformed YAML. ValueError: no mapping from tables to digests.
    """
    found = read(path, path.name).value or {}
    if not isinstance(found, Mapping) or not all(isinstance(digest, str) for digest in found.values()):
        raise ValueError(f"{path.name}: {found!r}: it is a mapping from tables to digests")
    return dict(found)


def digest(table: Table, rows: Sequence[Row]) -> str:
    """16 hexadecimal digits of SHA-256 over the headings and every row's line, spaces folded."""
    lines = [" | ".join(table.columns), *(f"{row.name}: {row.published.row}" for row in rows)]
    return hashlib.sha256("\n".join(" ".join(line.split()) for line in lines).encode()).hexdigest()[:16]


def check(table: Table, rows: Sequence[Row], digests: Mapping[str, str]) -> Check:
    """`rows`: all of the table."""
    known, own = digests.get(table.name, "no digest"), digest(table, rows)
    how = "as they were when compared with the document" if known == own else None
    return compared(table.name, table.name, "printed lines", known, own, how)
