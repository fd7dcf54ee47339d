"""Claims: what the documents print beside their runs' rows, each with the formula that recomputes it from rows and modules.

recipes/checks/claims.yaml holds groups. A group is a list of `claims` (texts), or a table: `columns`, a `formulas` entry for each, and
`rows` from a recipe's name to its cells, where the formulas call that name `row`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.verifying.check import Check, compared
from launch.verifying.expressions import evaluate
from launch.verifying.facts import Facts
from launch.verifying.printed import Printed, agreement
from recipes.tables import FOLDER
from recipes.yamlfile import read

CLAIMS = FOLDER / "checks" / "claims.yaml"
COMPARISONS = ("rounded", "at least", "at most", "within 10 %")
_MOST_INPUTS = 4  # printed inputs whose rounding is followed: 2^n evaluations


@dataclass(frozen=True)
class Claim:
    """One printed number.

    Attributes:
        formula: None where nothing can recompute it; `why` then says why.
        compare: one of `COMPARISONS`; "rounded" takes truncation too.
        places: decimals that it is exact to, where these are not what is printed.
    """

    group: str
    name: str
    quantity: str
    source: str
    printed: str
    formula: str | None = None
    row: str | None = None
    compare: str = "rounded"
    places: int | None = None
    why: str = ""

    @property
    def subject(self) -> str:
        return f"{self.group}/{self.name}"


def load(path: Path = CLAIMS) -> list[Claim]:
    """Every claim of the file.

    Raises:
        YamlError: malformed YAML. ValueError: a group, a key or a cell that does not fit; the message names it.
    """
    groups = read(path, path.name).value or {}
    return [claim for name, group in groups.items() for claim in _of_group(name, group)]


def _of_group(name: str, group: Mapping[str, Any]) -> Iterator[Claim]:
    if "claims" in group:
        for claim, values in group["claims"].items():
            yield _single(name, claim, {"source": group.get("source", ""), **values})
        return
    columns, formulas = group["columns"], group["formulas"]
    for row, text in group["rows"].items():
        cells = [cell.strip() for cell in str(text).split("|")]
        if not len(cells) == len(columns) == len(formulas):
            raise ValueError(f"claims.yaml: {name}: {row}: {len(cells)} cells for {len(columns)} columns and {len(formulas)} formulas")
        for column, formula, cell in zip(columns, formulas, cells, strict=True):
            if cell:
                yield Claim(name, row, column, group["source"], cell, formula, row)


def _single(group: str, name: str, values: Mapping[str, Any]) -> Claim:
    known = {"source", "says", "printed", "formula", "compare", "places", "why"}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"claims.yaml: {group}/{name}: {', '.join(unknown)}: unknown; a claim has {', '.join(sorted(known))}")
    compare = values.get("compare", "rounded")
    if compare not in COMPARISONS:
        raise ValueError(f"claims.yaml: {group}/{name}: compare={compare!r}: is one of {', '.join(COMPARISONS)}")
    if ("formula" in values) == ("why" in values):
        raise ValueError(f"claims.yaml: {group}/{name}: has a formula, or says why there is none")
    return Claim(
        group, name, str(values["says"]), str(values["source"]), str(values["printed"]), values.get("formula"), None, compare,
        values.get("places"), values.get("why", ""),
    )  # fmt: skip


def checks(claims: list[Claim], facts: Facts) -> Iterator[Check]:
    """`facts` are of all published rows: a claim may be about any of them."""
    for claim in claims:
        yield _check(claim, facts)


def _check(claim: Claim, facts: Facts) -> Check:
    if claim.formula is None:
        return Check(claim.group, claim.subject, claim.quantity, "not checkable", claim.printed, "", claim.why)
    names = {"row": claim.row} if claim.row else {}
    printed = Printed.read(claim.printed, places=claim.places)
    if printed is None:
        raise ValueError(f"claims.yaml: {claim.subject}: printed={claim.printed!r} holds no number")
    with facts.recording() as inputs:
        value = evaluate(claim.formula, facts.functions, names)
    computed = float(value)
    if claim.compare == "rounded":
        spread = None
        if 0 < len(inputs) <= _MOST_INPUTS:
            values = [float(evaluate(claim.formula, facts.moved(corner), names)) for corner in facts.corners(inputs)]
            spread = min(values), max(values)
        how = agreement(printed, computed, spread, "the printed inputs")
    else:
        how = _bound(claim.compare, printed.value, computed)
    return compared(claim.group, claim.subject, claim.quantity, claim.printed, _shown(value, len(claim.printed)), how)


def _shown(value: int | float, digits: int) -> str:
    """With about as many digits as are printed, without an exponent."""
    if isinstance(value, int) or value >= 1e9:
        return f"{value:.0f}"
    return f"{value:.{max(4, digits)}g}"


def _bound(compare: str, printed: float, computed: float) -> str | None:
    held = {
        "at least": computed >= printed, "at most": computed <= printed, "within 10 %": abs(computed / printed - 1) <= 0.1,
    }[compare]  # fmt: skip
    return compare if held else None
