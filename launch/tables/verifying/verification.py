"""The published tables recomputed: every row, from this project's modules and arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.tables.verifying import cells, downstream, memory, relations, settings, sizes, speeds
from launch.tables.verifying.counts import counts
from launch.tables.verifying.evidence import Erratum, Evidence, read
from launch.tables.verifying.rows import Check, Row, published_rows
from recipes import catalog
from recipes.problems import Problem, ProblemsError, did_you_mean
from recipes.schema import Downstream
from recipes.tables import FOLDER, Table

Lines = tuple[str, ...]
Progress = Callable[[Sequence[Row]], Iterator[Row]]
Explained = tuple[tuple[Erratum, tuple[Check, ...]], ...]


@dataclass(frozen=True)
class Report:
    """Everything that was compared.

    Attributes:
        checks: in the order of tables and rows.
        errata: each explanation, which several tables may share, and the disagreements that it explains.
        stale: disagreements of the errata that are none any more.
        repeated: how far the times of one configuration lie apart.
        texts: what the documents' texts get wrong, found by hand.
        rows: number of published rows of each table.
    """

    checks: tuple[Check, ...]
    errata: Explained
    stale: Lines
    repeated: Lines
    texts: Lines
    rows: Mapping[str, int]

    @property
    def explanations(self) -> dict[Check, Erratum]:
        """The erratum of each explained disagreement."""
        return {check: erratum for erratum, checks in self.errata for check in checks}

    @property
    def unexplained(self) -> tuple[Check, ...]:
        explained = self.explanations
        return tuple(check for check in self.checks if check.status == "disagrees" and check not in explained)

    @property
    def passed(self) -> bool:
        """Every disagreement is explained, and no explanation is stale."""
        return not (self.unexplained or self.stale)


def verify(only: Sequence[str] = (), *, folder: Path = FOLDER, progress: Progress = iter) -> Report:
    """Check the published tables of `folder`, or those of `only`; `progress` wraps the rows.

    Raises ProblemsError: an unknown name in `only`, a file that cannot be read; all broken recipes at once.
    """
    published = {table.name: table for table in catalog.tables(folder) if table.published}
    if problems := [
        Problem("--table", f"--table {name}", "no such published table", did_you_mean(name, published))
        for name in only
        if name not in published
    ]:
        raise ProblemsError(problems)
    tables = [table for name, table in published.items() if not only or name in only]
    evidence = {table.name: read(table) for table in tables}
    rows = published_rows(tables)
    checks: list[Check] = []
    for row in progress(rows):
        table = [other for other in rows if other.table is row.table]
        checks += _checks(row, table, evidence[row.table.name])
    for own in tables:
        of_table = [row for row in rows if row.table is own]
        known = evidence[own.name]
        checks += downstream.checks(own, of_table, known, _singles(published, known))
    number = Counter(row.table.name for row in rows)
    errata, stale = _explain(checks, rows, evidence)
    texts = tuple(text for found in evidence.values() for text in found.texts)
    return Report(tuple(checks), errata, stale, tuple(relations.repeated(rows)), texts, number)


def _singles(published: Mapping[str, Table], evidence: Evidence) -> dict[str, Downstream]:
    """Scores of the single models of a table of ensembles; none for any other table."""
    if evidence.single_models is None:
        return {}
    table = published.get(name := evidence.single_models)
    if table is None:
        fix = did_you_mean(name, published)
        raise ProblemsError([Problem("evidence.single_models", name, "no such published table", fix)])
    return downstream.scores_of(published_rows([table]), read(table))


def _checks(row: Row, table: Sequence[Row], evidence: Evidence) -> Iterator[Check]:
    """Everything about one row; `table`: all rows of its table."""
    yield from cells.checks(row)
    yield from relations.layout(row)
    if row.recipe.model.heads % row.tp:
        why = "no module of this layout can be built: tp does not divide the heads"
        yield row.unchecked("parameters", why)
    else:
        counted = counts(row.recipe)
        yield from sizes.checks(row, counted, evidence)
        yield from speeds.checks(row, counted.once, evidence)
    yield from settings.checks(row, evidence)
    yield from relations.checks(row, table)
    yield from memory.checks(row, table)


def _explain(
    checks: Sequence[Check], rows: Sequence[Row], evidence: Mapping[str, Evidence]
) -> tuple[Explained, Lines]:
    """The errata that explain disagreements, and the disagreements of errata that are none any more."""
    wrong = {(check.subject, check.difference): check for check in checks if check.status == "disagrees"}
    explained: dict[str, tuple[Erratum, list[Check]]] = {}
    stale = []
    for row in rows:
        for known in evidence[row.table.name].errata_of(row.name):
            if check := wrong.get((row.full_name, known.difference)):
                explained.setdefault(known.erratum.text, (known.erratum, []))[1].append(check)
            else:
                stale.append(f"{row.full_name} {known.difference}")
    return tuple((erratum, tuple(found)) for erratum, found in explained.values()), tuple(stale)
