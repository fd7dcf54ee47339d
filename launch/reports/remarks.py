"""What a recipe says about itself next to its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.reports.tables import Row
from launch.runs.result_text import EXACT


@dataclass(frozen=True)
class Remark:
    """A sentence. `kind`: "erratum", "note", ...; `key`: of the recipe, where it is about one."""

    kind: str
    text: str
    key: str = ""

    @property
    def what(self) -> str:
        """What the sentence is, as it is written in front of it."""
        if self.kind == "printed":
            return f"{self.key} printed as"
        return f"{self.kind}: {self.key}" if self.key else self.kind


@dataclass(frozen=True)
class Remarks:
    """The remarks of a row, or those that all rows of a table share (`row` None)."""

    row: Row | None
    remarks: tuple[Remark, ...]

    @property
    def errata(self) -> int:
        return sum(remark.kind == "erratum" for remark in self.remarks)

    @property
    def kinds(self) -> str:
        """What the remarks are about: "note; unknown: steps; inferred: optimizer, schedule"."""
        keys: dict[str, dict[str, None]] = {}
        for remark in self.remarks:
            kind = remark.what if remark.kind == "printed" else remark.kind
            found = keys.setdefault(kind, {})
            if remark.key and remark.kind != "printed":
                found[remark.key] = None
        return "; ".join(f"{kind}: {', '.join(found)}" if found else kind for kind, found in keys.items())


def remarks_of(row: Row) -> list[Remark]:
    """Errata, note, printed values that cannot be, what no source gives, and where the rest comes from."""
    found = [Remark("erratum", str(known)) for known in row.errata]
    if row.recipe is None:
        return found
    recipe, published = row.recipe, row.recipe.published
    if published and published.tflops and published.tflops_by == "exact":
        found.append(Remark("TFLOPS counted", EXACT))
    if recipe.note:
        found.append(Remark("note", " ".join(recipe.note.split())))
    printed = published.printed if published else {}
    found += [Remark("printed", str(value), key) for key, value in printed.items()]
    for kind in ("differs", "unknown", "inferred"):
        found += [Remark(kind, text, key) for key, text in getattr(recipe, kind).items()]
    return found


def split_remarks(rows: Sequence[Row]) -> tuple[Remarks, tuple[Remarks, ...]]:
    """(what all of several rows say, what each says besides that): a table's defaults are read once."""
    every = [Remarks(row, tuple(remarks_of(row))) for row in rows]
    shared = every[0].remarks if len(every) > 1 else ()
    # Each row's mark leads to its own errata.
    common = tuple(
        each for each in shared if each.kind != "erratum" and all(each in other.remarks for other in every)
    )
    own = (
        replace(each, remarks=tuple(remark for remark in each.remarks if remark not in common))
        for each in every
    )
    return Remarks(None, common), tuple(each for each in own if each.remarks)
