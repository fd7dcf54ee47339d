"""Verification of the published tables: every quantity of every row, recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from launch.tables.evidence import Erratum
from recipes import catalog
from recipes.problems import Problem, ProblemsError, did_you_mean
from recipes.schema import Downstream
from recipes.tables import FOLDER, Table
from tools.tables import quantities, score_relations, transcription
from tools.tables.lines import (
    CheckedRow,
    CheckedTable,
    Checks,
    LineCheck,
    checked_tables,
)

Lines = tuple[str, ...]
ExplainedErrata = tuple[tuple[Erratum, Sequence[LineCheck]], ...]
# Everything that is checked of a row, in the order of the report.
QUANTITIES: tuple[Callable[[CheckedRow], Checks], ...] = (
    transcription.entries,
    quantities.layout,
    quantities.sizes,
    quantities.samples,
    quantities.tflops,
    quantities.operations_per_second,
    quantities.missing_time,
    quantities.share_of_peak,
    quantities.speedup,
    quantities.speeds_of_other_runs,
    transcription.settings,
    quantities.scaling,
    quantities.time_over_micro_batches,
    quantities.memory,
)


@dataclass(frozen=True)
class VerificationReport:
    """The result of a verification.

    Attributes:
        errata: each explanation, perhaps shared by several tables, and its disagreements.
        stale: errata's disagreements that have disappeared.
        repeated: remarks on several times of one configuration.
        texts: errors of the documents' texts, found by hand.
    """

    checks: tuple[LineCheck, ...]
    errata: ExplainedErrata
    stale: Lines
    repeated: Lines
    texts: Lines
    rows: Mapping[str, int]

    @property
    def explanations(self) -> dict[LineCheck, Erratum]:
        """The erratum of each explained disagreement."""
        return {check: erratum for erratum, checks in self.errata for check in checks}

    @property
    def unexplained(self) -> tuple[LineCheck, ...]:
        explained = self.explanations
        return tuple(
            check
            for check in self.checks
            if check.status == "disagrees" and check not in explained
        )

    @property
    def passed(self) -> bool:
        """True if every disagreement is explained, and no explanation is stale."""
        return not (self.unexplained or self.stale)


def verify(only: Sequence[str] = (), folder: Path = FOLDER) -> VerificationReport:
    """Check the published tables of `folder`, or those in `only`.

    Raises ProblemsError: an unknown name in `only`, a file that cannot be read; all broken recipes at once.
    """
    published = {
        table.name: table for table in catalog.tables(folder) if table.published
    }
    problems = []
    for name in only:
        if name not in published:
            fix = did_you_mean(name, published)
            problems.append(Problem("TABLE", name, "no such published table", fix))
    if problems:
        raise ProblemsError(problems)
    sources = checked_tables(
        [table for name, table in published.items() if not only or name in only]
    )
    rows = [row for source in sources for row in source.rows]
    checks: list[LineCheck] = []
    for row in rows:
        for quantity in QUANTITIES:
            checks += quantity(row)
    for source in sources:
        checks += score_relations.checks(source, _singles(published, source))
    errata, stale = _explain(checks, sources)
    texts = tuple(text for source in sources for text in source.evidence.texts)
    number = {source.table.name: len(source.rows) for source in sources}
    return VerificationReport(
        tuple(checks), errata, stale, tuple(_repeated(rows)), texts, number
    )


def _singles(
    published: Mapping[str, Table], source: CheckedTable
) -> dict[str, Downstream]:
    """Return the scores of the single models behind a table of ensembles; {} for other tables."""
    name = source.evidence.single_models
    if name is None:
        return {}
    if name not in published:
        fix = did_you_mean(name, published)
        raise ProblemsError.of(
            "evidence.single_models", name, "no such published table", fix
        )
    (of_singles,) = checked_tables([published[name]])
    lines = (*of_singles.rows, *of_singles.others)
    return {
        line.name: line.published.downstream
        for line in lines
        if line.published.downstream
    }


def _repeated(rows: Sequence[CheckedRow]) -> Iterator[str]:
    """Yield remarks on configurations with several printed times."""
    same = quantities.configuration
    timed = [row for row in rows if row.published.time_per_iteration_s]
    for _, group in groupby(sorted(timed, key=lambda row: repr(same(row))), key=same):
        times = {}
        for row in group:
            times[row.full_name] = row.published.time_per_iteration_s or 0.0
        if len(times) > 1:
            every = times.values()
            apart = f"{100 * (max(every) / min(every) - 1):.0f} % apart, for one configuration"
            shown = " / ".join(f"{time:g}" for time in every)
            yield f"{shown} s, {apart}: {', '.join(times)}"


def _explain(
    checks: Sequence[LineCheck], sources: Sequence[CheckedTable]
) -> tuple[ExplainedErrata, Lines]:
    """Return the errata with their disagreements, and the stale disagreements."""
    wrong = {
        (check.subject, check.difference): check
        for check in checks
        if check.status == "disagrees"
    }
    explained: dict[str, tuple[Erratum, list[LineCheck]]] = {}
    stale = []
    for source in sources:
        for row in source.rows:
            for known in source.evidence.errata_of(row.name):
                check = wrong.get((row.full_name, known.difference))
                erratum = known.erratum
                if check:
                    _, own = explained.setdefault(erratum.text, (erratum, []))
                    own.append(check)
                else:
                    stale.append(f"{row.full_name} {known.difference}")
    return tuple(explained.values()), tuple(stale)
