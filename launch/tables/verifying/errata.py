"""Errata: which disagreements with the sources are explained. recipes/checks/errata.yaml is a list of

    - disagreements: [the line of each, as `recipes.py verify` prints it]
      explanation: why the source prints something else
      later: what its author printed afterwards, where that is known

A line holds both numbers, so that a digit changed on either side is a disagreement that nothing explains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.tables.verifying.check import Check
from recipes.tables import FOLDER
from recipes.yaml_lines import read

ERRATA = FOLDER / "checks" / "errata.yaml"


@dataclass(frozen=True)
class Erratum:
    """One explanation and what it explains."""

    lines: tuple[str, ...]
    explanation: str
    later: str | None = None

    @property
    def text(self) -> str:
        return self.explanation + (f" Later: {self.later}" if self.later else "")


def load(path: Path = ERRATA) -> list[Erratum]:
    """Every erratum of the file.

    Raises:
        YamlError: malformed YAML. ValueError: an entry that is none, or a line under two explanations.
    """
    entries = read(path, path.name).value or []
    found = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or set(entry) - {"disagreements", "explanation", "later"}:
            raise ValueError(
                f"{path.name}: entry {number} is {entry!r}: it has disagreements, an explanation and perhaps later"
            )
        if not entry.get("disagreements") or not entry.get("explanation"):
            raise ValueError(
                f"{path.name}: entry {number}: needs disagreements (lines of `recipes.py verify`) and an explanation"
            )
        found.append(Erratum(tuple(entry["disagreements"]), entry["explanation"], entry.get("later")))
    lines = [line for erratum in found for line in erratum.lines]
    if twice := sorted({line for line in lines if lines.count(line) > 1}):
        raise ValueError(f"{path.name}: explained twice: {'; '.join(twice)}: keep one")
    return found


@dataclass(frozen=True)
class Sorted:
    """Disagreements with their explanations.

    Attributes:
        explained: (erratum, its disagreements).
        unexplained: disagreements that no erratum names.
        stale: lines of errata that are no disagreement any more.
    """

    explained: tuple[tuple[Erratum, tuple[Check, ...]], ...]
    unexplained: tuple[Check, ...]
    stale: tuple[str, ...]


def sort(
    disagreements: Sequence[Check], errata: Iterable[Erratum], subjects: Collection[str] | None = None
) -> Sorted:
    """Match by line. `subjects`: those that were checked, None for all: errata of others are not stale.

    Raises:
        ValueError: two disagreements of one line, which one erratum would explain.
    """
    errata = list(errata)
    by_line = {check.line: check for check in disagreements}
    if twice := [line for line, times in Counter(check.line for check in disagreements).items() if times > 1]:
        raise ValueError(
            f"disagreements that print the same line: {'; '.join(twice)}: an erratum could not tell them apart; give the columns of a "
            "table, and what claims say, different names"
        )
    known = {line for erratum in errata for line in erratum.lines}
    explained = [
        (erratum, tuple(by_line[line] for line in erratum.lines if line in by_line)) for erratum in errata
    ]
    return Sorted(
        tuple((erratum, checks) for erratum, checks in explained if checks),
        tuple(check for check in disagreements if check.line not in known),
        tuple(
            line
            for line in sorted(known - set(by_line))
            if subjects is None or line.partition(" ")[0] in subjects
        ),
    )


def of_row(name: str, errata: Iterable[Erratum]) -> list[str]:
    """What the errata say of a row: each disagreement and its explanation."""
    return [
        f"{line.removeprefix(name).strip()}. {erratum.text}"
        for erratum in errata
        for line in erratum.lines
        if line.startswith(f"{name} ")
    ]
