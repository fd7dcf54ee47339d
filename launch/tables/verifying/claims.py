"""Claims: what the documents print beside their runs' rows, each with the formula that recomputes it from rows and modules.

recipes/checks/claims.yaml holds groups. A group is a list of `claims` (texts), or a table: `columns`, a `formulas` entry for each, and
`rows` from a recipe's name to its cells, where the formulas call that name `row`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.tables.verifying.check import Check, compared
from launch.tables.verifying.expressions import evaluate
from launch.tables.verifying.facts import Facts
from launch.tables.verifying.printed_values import Printed, agreement
from recipes.tables import FOLDER
from recipes.yaml_lines import read

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
    groups = _mapping(read(path, path.name).value or {}, path.name, "groups of claims")
    return [
        claim
        for name, group in groups.items()
        for claim in _of_group(f"{path.name}: {name}", str(name), group)
    ]


def _of_group(where: str, name: str, group: Any) -> Iterator[Claim]:
    group = _mapping(group, where, "claims, or columns, formulas and rows")
    if "claims" in group:
        _check_keys(group, where, "a group of claims", optional={"claims", "source"})
        for claim, values in _mapping(group["claims"], f"{where}: claims", "claims by their names").items():
            values = _mapping(values, f"{where}/{claim}", "source, says, printed, and formula or why")
            yield _single(
                f"{where}/{claim}",
                name,
                str(claim),
                {**{k: group[k] for k in ("source",) if k in group}, **values},
            )
        return
    _check_keys(
        group, where, "a table (a group without claims)", required={"source", "columns", "formulas", "rows"}
    )
    columns, formulas = (_texts(group[key], f"{where}: {key}") for key in ("columns", "formulas"))
    for row, text in _mapping(group["rows"], f"{where}: rows", "cells by the names of recipes").items():
        cells = [cell.strip() for cell in str(text).split("|")]
        if not len(cells) == len(columns) == len(formulas):
            raise ValueError(
                f"{where}: {row}: {len(cells)} cells for {len(columns)} columns and {len(formulas)} formulas"
            )
        for column, formula, cell in zip(columns, formulas, cells, strict=True):
            if cell:
                yield Claim(name, row, column, group["source"], cell, formula, row)


def _mapping(value: Any, where: str, holds: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {value!r}: a mapping belongs here, with {holds}")
    return value


def _texts(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{where}: {value!r}: a list of texts belongs here")
    return value


def _check_keys(
    values: Mapping[str, Any],
    where: str,
    what: str,
    required: Set[str] = frozenset(),
    optional: Set[str] = frozenset(),
) -> None:
    """Raises ValueError naming the keys that are missing or unknown."""
    missing, unknown = sorted(required - set(values)), sorted(set(values) - required - optional)
    problems = [
        f"{', '.join(keys)}: {problem}"
        for keys, problem in ((missing, "missing"), (unknown, "unknown"))
        if keys
    ]
    if problems:
        raise ValueError(
            f"{where}: {'; '.join(problems)}; {what} has {', '.join(sorted(required | optional))}"
        )


def _single(where: str, group: str, name: str, values: Mapping[str, Any]) -> Claim:
    _check_keys(
        values, where, "a claim", {"source", "says", "printed"}, {"formula", "compare", "places", "why"}
    )
    compare = values.get("compare", "rounded")
    if compare not in COMPARISONS:
        raise ValueError(f"{where}: compare={compare!r}: is one of {', '.join(COMPARISONS)}")
    if ("formula" in values) == ("why" in values):
        raise ValueError(f"{where}: has a formula, or says why there is none")
    formula = str(values["formula"]) if "formula" in values else None
    return Claim(
        group, name, str(values["says"]), str(values["source"]), str(values["printed"]), formula, None, compare,
        values.get("places"), values.get("why", ""),
    )  # fmt: skip


def checks(claims: list[Claim], facts: Facts) -> Iterator[Check]:
    """`facts` are of all published rows: a claim may be about any of them."""
    for claim in claims:
        yield _check(claim, facts)


def _check(claim: Claim, facts: Facts) -> Check:
    if claim.formula is None:
        return Check(
            claim.group, claim.subject, claim.quantity, "not checkable", claim.printed, "", claim.why
        )
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
            values = [
                float(evaluate(claim.formula, facts.moved(corner), names)) for corner in facts.corners(inputs)
            ]
            spread = min(values), max(values)
        how = agreement(printed, computed, spread, "the printed inputs")
    else:
        how = _bound(claim.compare, printed.value, computed)
    return compared(
        claim.group, claim.subject, claim.quantity, claim.printed, _shown(value, len(claim.printed)), how
    )


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
