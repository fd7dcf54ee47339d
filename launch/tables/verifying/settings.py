"""Settings: what texts, papers and public scripts say of whole rows beside their tables. recipes/checks/settings.yaml is a list of

    - source: the document
      rows: [patterns of "table/row", with * for anything and [1-7] for one of these]
      says: {a quotation: {key of the recipe: its value there}}

and every row that a pattern names has to have these values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from launch.tables.verifying.check import Check
from launch.tables.verifying.rows import Row
from recipes import key_paths
from recipes.problems import did_you_mean
from recipes.tables import FOLDER
from recipes.yaml_lines import read

SETTINGS = FOLDER / "checks" / "settings.yaml"
_PARTS = {"source", "rows", "says"}


@dataclass(frozen=True)
class Setting:
    """One value that a source gives for one or more rows."""

    rows: tuple[str, ...]
    source: str
    quotation: str
    key: str
    value: Any

    def names(self, row: Row) -> bool:
        return any(fnmatchcase(row.full_name, pattern) for pattern in self.rows)


def load(path: Path = SETTINGS) -> list[Setting]:
    """Every setting of the file.

    Raises:
        YamlError: malformed YAML. ValueError: an entry that is none, a key that no recipe has, a table that there is not.
    """
    found = []
    known = sorted(key_paths.paths())
    for number, entry in enumerate(read(path, path.name).value or [], 1):
        where = f"{path.name}: entry {number}"
        if not isinstance(entry, dict) or set(entry) != _PARTS:
            raise ValueError(
                f"{where} is {entry!r}: it has a source, rows (patterns) and says (quotations with keys and values)"
            )
        for pattern in entry["rows"]:
            if not list(FOLDER.glob(f"{pattern.partition('/')[0]}.yaml")) or "/" not in pattern:
                raise ValueError(
                    f"{where}: rows: {pattern}: no such table: patterns are table/row, with * for anything"
                )
        for quotation, values in entry["says"].items():
            for key, value in values.items():
                if key not in known:
                    raise ValueError(
                        f"{where}: {quotation!r}: no recipe has a key {key}: {did_you_mean(key, known)}"
                    )
                found.append(Setting(tuple(entry["rows"]), entry["source"], quotation, key, value))
    return found


def checks(row: Row, settings: Sequence[Setting]) -> Iterator[Check]:
    """One check per value that a source gives for the row.

    Raises:
        ValueError: a key that is said twice of the row.
    """
    said: set[str] = set()
    for setting in settings:
        if not setting.names(row):
            continue
        if setting.key in said:
            raise ValueError(f"settings.yaml: {row.full_name}: {setting.key} is said twice: once is enough")
        said.add(setting.key)
        own = row.own(setting.key)
        borrowed = "stands in, from " if row.unknown(setting.key) else ""
        how = f'{borrowed}{setting.source}: "{setting.quotation}"' if _same(setting.value, own) else None
        yield replace(
            row.compare(f"setting {setting.key}", _shown(setting.value), _shown(own), how), stated=True
        )


def keys(row: Row, settings: Sequence[Setting]) -> set[str]:
    """The keys that a source gives for the row."""
    return {setting.key for setting in settings if setting.names(row)}


def check_patterns(settings: Sequence[Setting], rows: Sequence[Row]) -> None:
    """Raises ValueError where a pattern names none of the rows, though its table is among them."""
    tables = {row.table.name for row in rows}
    for pattern in dict.fromkeys(pattern for setting in settings for pattern in setting.rows):
        present = any(fnmatchcase(table, pattern.partition("/")[0]) for table in tables)
        # Part of a repository's tables (another folder) may lack the rows that a pattern over several tables names.
        if (
            present
            and "*" not in pattern.partition("/")[0]
            and not any(fnmatchcase(row.full_name, pattern) for row in rows)
        ):
            raise ValueError(f"settings.yaml: rows: {pattern} names no row of its table")


def _same(said: Any, own: Any) -> bool:
    if isinstance(said, list):
        return isinstance(own, (list, tuple)) and len(said) == len(own) and all(map(_same, said, own))
    if isinstance(said, (bool, str)) or isinstance(own, (bool, str)) or own is None:
        return type(said) is type(own) and said == own
    return bool(abs(said - own) <= 1e-9 * abs(said))


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
