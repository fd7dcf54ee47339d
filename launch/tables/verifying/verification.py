"""The published tables recomputed: every row and every claim, from this project's modules and arithmetic.

`verify()` gives a `Report`; `errata_of` what is known of one row, without computing anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launch.tables.verifying import errata as errata_file
from launch.tables.verifying.check import Check
from recipes import catalog
from recipes.problems import did_you_mean
from recipes.tables import FOLDER, Table

if TYPE_CHECKING:
    from launch.tables.verifying.claims import Claim
    from launch.tables.verifying.rows import Row
    from modeling.counting import RankCounts


@dataclass(frozen=True)
class Report:
    """Everything that was compared.

    Attributes:
        checks: in the order of tables and rows.
        sorted: the disagreements among them, explained or not.
        remarks: what is worth knowing and no disagreement.
        rows: published rows per table; claims count in their group.
    """

    checks: tuple[Check, ...]
    sorted: errata_file.Sorted
    remarks: tuple[str, ...] = ()
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Every disagreement is explained, and no explanation is stale."""
        return not (self.sorted.unexplained or self.sorted.stale)

    @property
    def statuses(self) -> dict[Check, str]:
        """Of every check, a disagreement as "erratum" or "UNEXPLAINED"."""
        unexplained = set(self.sorted.unexplained)
        return {
            check: check.status
            if check.status != "disagrees"
            else "UNEXPLAINED"
            if check in unexplained
            else "erratum"
            for check in self.checks
        }


def verify(
    only: Sequence[str] = (),
    *,
    folder: Path = FOLDER,
    claims: Path | None = None,
    errata: Path | None = None,
    settings: Path | None = None,
    progress: Callable[[Sequence[Row]], Iterator[Row]] | None = None,
) -> Report:
    """Check the published tables of `folder` and the claims; of `only` these tables and groups of claims, where any are named.

    `claims`, `errata` and `settings` are files, those of recipes/checks/ where None. `progress` wraps the rows while their modules
    are built.

    Raises:
        ValueError: an unknown name in `only`, or a file that cannot be read; every broken recipe at once.
    """
    from launch.tables.verifying import claims as claims_file
    from launch.tables.verifying import settings as settings_file
    from launch.tables.verifying import transcription, unchecked
    from launch.tables.verifying.rows import published_rows

    tables = [table for table in catalog.tables(folder) if table.published]
    every_claim = claims_file.load(claims or claims_file.CLAIMS)
    _check_names(only, tables, every_claim)
    every_row = published_rows(tables)
    rows = [row for row in every_row if not only or row.table.name in only]
    every_setting = settings_file.load(settings or settings_file.SETTINGS)
    settings_file.check_patterns(every_setting, every_row)
    claimed = unchecked.claimed(every_claim)
    chosen = [claim for claim in every_claim if not only or claim.group in only]

    counted = _Counts()
    checks = [check for row in (progress(rows) if progress else rows) for check in _of_row(row, counted)]
    for row in rows:
        checks += settings_file.checks(row, every_setting)
        said = settings_file.keys(row, every_setting) | {
            key for name, key in claimed if name == row.full_name
        }
        checks += unchecked.checks(row, said)
    digests = transcription.load()
    for table in tables:
        if lines := [row for row in rows if row.table.name == table.name]:
            checks.append(replace(transcription.check(table, lines, digests), transcribed=True))
    checks += _between_rows(rows)
    checks += _of_claims(chosen, every_row, counted)
    order = [*(table.name for table in tables), *dict.fromkeys(claim.group for claim in every_claim)]
    checks.sort(key=lambda check: order.index(check.table))
    disagreements = [check for check in checks if check.status == "disagrees"]
    subjects = {check.subject for check in checks} if only else None
    sorted_ = errata_file.sort(disagreements, errata_file.load(errata or errata_file.ERRATA), subjects)
    number = Counter([row.table.name for row in rows] + [claim.group for claim in chosen])
    return Report(
        tuple(checks),
        sorted_,
        tuple(_remarks(rows)),
        {name: number[name] for name in order if name in number},
    )


def errata_of(row_name: str) -> list[str]:
    """What is wrong with a published row ("table/row"), one text for each disagreement; reads errata.yaml and no more."""
    return errata_file.of_row(row_name, errata_file.load())


def _check_names(only: Sequence[str], tables: Sequence[Table], claims: Sequence[Claim]) -> None:
    known = {table.name for table in tables} | {claim.group for claim in claims}
    unknown = [
        f"--table {name}: no such published table: {did_you_mean(name, known)}"
        for name in only
        if name not in known
    ]
    if unknown:
        raise ValueError("\n".join(unknown))


class _Counts:
    """Parameters of rows, counted when they are first asked for."""

    def __init__(self) -> None:
        self._of: dict[str, RankCounts] = {}

    def __call__(self, row: Row) -> RankCounts:
        from launch.tables.verifying.counts import counts

        if row.full_name not in self._of:
            self._of[row.full_name] = counts(row.recipe)
        return self._of[row.full_name]


def _of_row(row: Row, counted: Callable[[Row], RankCounts]) -> Iterator[Check]:
    from launch.tables.verifying import cells, layouts, sizes, speeds

    yield from (replace(check, transcribed=True) for check in cells.checks(row))
    yield from layouts.checks(row)
    if row.recipe.model.heads % row.recipe.parallel.model_parallel[0]:
        yield row.say(
            "not checkable",
            "parameters",
            how="no module of this layout can be built: tp does not divide the heads",
        )
        return
    counts = counted(row)
    yield from sizes.checks(row, counts)
    yield from speeds.checks(row, counts.once)


def _between_rows(rows: Sequence[Row]) -> list[Check]:
    from launch.tables.verifying import memory, relations

    names = dict.fromkeys(row.table.name for row in rows)
    tables = [[row for row in rows if row.table.name == name] for name in names]
    return [check for table in tables for module in (relations, memory) for check in module.checks(table)]


def _of_claims(
    claims: Sequence[Claim], rows: Sequence[Row], counted: Callable[[Row], RankCounts]
) -> list[Check]:
    from launch.tables.verifying import claims as claims_file
    from launch.tables.verifying.facts import Facts

    return list(claims_file.checks(list(claims), Facts(rows, counted)))


def _remarks(rows: Sequence[Row]) -> list[str]:
    from launch.tables.verifying.relations import repeated

    return repeated(rows)
