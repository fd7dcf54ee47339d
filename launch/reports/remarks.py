"""Remarks of recipes for reports: errata, notes, unknown and inferred values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launch.records.result_text import EXACT
from launch.reports.tables import PublishedRow


class Remark(NamedTuple):
    """A sentence about a row. `kind`: "erratum", "note", ...; `key`: the recipe's key, if there is one."""

    kind: str
    text: str
    key: str = ""

    @property
    def what(self) -> str:
        """Return the words in front of the sentence: its kind and key."""
        if self.kind == "printed":
            return f"{self.key} printed as"
        return f"{self.kind}: {self.key}" if self.key else self.kind


class Remarks(tuple[Remark, ...]):
    """The remarks of one row, or the common remarks of a table."""

    @property
    def errata(self) -> int:
        return sum(remark.kind == "erratum" for remark in self)

    @property
    def kinds(self) -> str:
        """Return kinds and keys: "note; unknown: steps; inferred: optimizer, schedule"."""
        keys: dict[str, list[str]] = {}
        for remark in self:
            printed = remark.kind == "printed"
            found = keys.setdefault(remark.what if printed else remark.kind, [])
            if remark.key and not printed and remark.key not in found:
                found.append(remark.key)
        return "; ".join(f"{kind}: {', '.join(found)}" if found else kind for kind, found in keys.items())


def remarks_of(row: PublishedRow) -> list[Remark]:
    """Return errata, note, impossible printed values, unknown values, and origins of inferred values."""
    found = [Remark("erratum", str(known)) for known in row.errata]
    if row.no_recipe:
        found.append(Remark("no recipe", row.no_recipe))
    if row.recipe is None:
        return found
    if (published := row.published) and published.tflops and published.tflops_by == "exact":
        found.append(Remark("TFLOPS counted", EXACT))
    if row.recipe.note:
        found.append(Remark("note", " ".join(row.recipe.note.split())))
    printed = published.printed if published else {}
    found += [Remark("printed", str(value), key) for key, value in printed.items()]
    for kind in ("differs", "unknown", "inferred"):
        found += [Remark(kind, text, key) for key, text in getattr(row.recipe, kind).items()]
    return found


def split_remarks(rows: Sequence[PublishedRow]) -> tuple[Remarks, list[tuple[PublishedRow, Remarks]]]:
    """Return the common remarks of all rows, and each row's other remarks."""
    every = [remarks_of(row) for row in rows]
    recipes = [own for row, own in zip(rows, every, strict=True) if not row.no_recipe]
    shared = recipes[0] if len(recipes) > 1 else []
    # Each row's mark leads to its own errata.
    common = [each for each in shared if each.kind != "erratum" and all(each in own for own in recipes)]
    besides = (Remarks(each for each in own if each not in common) for own in every)
    return Remarks(common), [(row, own) for row, own in zip(rows, besides, strict=True) if own]
