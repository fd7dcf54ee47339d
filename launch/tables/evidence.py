"""Evidence for a published table, under the key `evidence` of its file.

    evidence:
      settings:  # what texts, papers and public scripts say
      - source: the document
        says: {a quotation: {key of the recipe: its value there}}               # about every row
        rows: {"18b-*": {a quotation: {key of the recipe: its value there}}}    # about the rows of a pattern
      sizes:     # parameters that logs and other tables print
      - source: the log
        rows: {18b-g16: {first stage: 1217086464, all ranks: 18.6B}}
      speeds:    # other runs of a row's model, every product counted and layers recomputed
      - source: the document
        rows: {1.2b: [{gpus: 1, batch: 8, milliseconds: 1121, tflops: "71.9"}]}
      errata:    # disagreements as `tools/check_tables.py` prints them, explained
      - explanation: the printed value is twice what the formula gives
        later: what its author printed afterwards, where that is known
        disagreements: [{quantity: TFLOPS, printed: "25.66", computed: "12.83", rows: [23b-g16]}]
      others:    # lines of the table about models that this project cannot train
        albert:
          why: it shares its parameters over the layers
          published: {source: the document, row: "ALBERT | 3 | …", trained_tokens: 3, downstream: {…}}
          pretraining: {source: its paper, steps: 1500000, batch: 4096, sequence_length: 512}
      single_models: a100_blog_table2   # table of the models, one by one, that this one's ensembles are of
      texts: [what the document's text gets wrong, found by hand]

An erratum holds both numbers: a digit changed on either side makes a disagreement that nothing explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, NamedTuple

from pydantic import Field

from recipes import key_paths
from recipes.problems import Problem, ProblemsError, did_you_mean
from recipes.schema import Published, Strict
from recipes.tables import Table, checked

Part = Literal["each once", "all ranks", "first stage", "middle stages", "last stage"]
ValuesByQuotation = dict[str, dict[str, Any]]


class Statement(NamedTuple):
    """A source's value for a key of a row."""

    source: str
    quotation: str
    key: str
    value: Any


class Quotations(Strict):
    """Quotations of one source about all rows, and about rows by pattern."""

    source: str
    says: ValuesByQuotation = {}
    rows: dict[str, ValuesByQuotation] = {}


class Sizes(Strict):
    """Numbers of parameters, in all or of a stage on one rank; text keeps digits and unit as printed."""

    source: str
    rows: dict[str, dict[Part, int | str]]


class OtherRun(Strict):
    """Another run of a row's model. `milliseconds`: of an iteration; `tflops`: per GPU, as printed."""

    gpus: int
    batch: int
    milliseconds: float
    tflops: str = Field(pattern=r"^\d+(\.\d+)?$")


class Speeds(Strict):
    source: str
    rows: dict[str, list[OtherRun]]


class Pretraining(Strict):
    """The length of a model's training by its own paper; `batch` in samples."""

    source: str
    steps: int
    batch: int
    sequence_length: int


class OtherModel(Strict):
    """A line of the table about a model without a recipe; `why`: the reason."""

    why: str
    published: Published
    pretraining: Pretraining | None = None


class CellDisagreement(Strict):
    """A difference from the source, with its rows."""

    quantity: str
    printed: str
    computed: str
    rows: list[str] = Field(min_length=1)


class Erratum(Strict):
    """An explanation of disagreements."""

    explanation: str
    later: str | None = None
    disagreements: list[CellDisagreement] = Field(min_length=1)

    @property
    def text(self) -> str:
        return self.explanation + (f" Later: {self.later}" if self.later else "")


class RowErratum(NamedTuple):
    """An explained disagreement of one row with its source."""

    quantity: str
    difference: str
    erratum: Erratum

    def __str__(self) -> str:
        return f"{self.difference}. {self.erratum.text}"


class Evidence(Strict):
    """Evidence about a table's rows besides their own cells."""

    settings: list[Quotations] = []
    sizes: list[Sizes] = []
    speeds: list[Speeds] = []
    errata: list[Erratum] = []
    others: dict[str, OtherModel] = {}
    single_models: str | None = None
    texts: list[str] = []

    def statements(self, row: str) -> Iterator[Statement]:
        """Yield the statements of texts and scripts about a row."""
        for part in self.settings:
            of_row = [
                says for pattern, says in part.rows.items() if fnmatchcase(row, pattern)
            ]
            for says in (part.says, *of_row):
                for quotation, values in says.items():
                    for key, value in values.items():
                        yield Statement(part.source, quotation, key, value)

    def errata_of(self, row: str) -> Iterator[RowErratum]:
        for erratum in self.errata:
            for one in erratum.disagreements:
                if row in one.rows:
                    said = difference(one.quantity, one.printed, one.computed)
                    yield RowErratum(one.quantity, said, erratum)


def difference(quantity: str, printed: str, computed: str) -> str:
    """Describe a disagreement in one phrase."""
    return f"{quantity}: printed {printed}, computed {computed}"


def read(table: Table) -> Evidence:
    """Read a table's evidence. Raises ProblemsError: unknown keys, rows, patterns; repetitions."""
    evidence = checked(Evidence, table.evidence, table.document, "evidence")
    problems = list(_problems(table, evidence))
    if problems:
        raise ProblemsError(problems)
    return evidence


def _problems(table: Table, evidence: Evidence) -> Iterator[Problem]:
    wrong = partial(_wrong, table)
    known = sorted(key_paths.paths())
    for part in evidence.settings:
        yield from _problems_of_settings(table, part, known)
    named = [("sizes", row) for sizes in evidence.sizes for row in sizes.rows]
    named += [("speeds", row) for speeds in evidence.speeds for row in speeds.rows]
    for each in evidence.errata:
        for one in each.disagreements:
            named += [("errata", row) for row in one.rows]
    for name, row in named:
        if row not in table.rows:
            yield wrong(name, row, "no row of the table", did_you_mean(row, table.rows))
    for row in evidence.others.keys() & table.rows.keys():
        yield wrong("others", row, "is a recipe of the table", "leave it out")
    for row in table.rows:
        yield from _said_twice(table, evidence, row)


def _problems_of_settings(
    table: Table, settings: Quotations, known: Sequence[str]
) -> Iterator[Problem]:
    """Yield patterns that name no row, and quotations of keys that are not `known`, those of recipes."""
    for pattern in settings.rows:
        if not any(fnmatchcase(row, pattern) for row in table.rows):
            yield _wrong(
                table,
                "settings",
                pattern,
                "names no row of the table",
                "correct the pattern",
            )
    for says in (settings.says, *settings.rows.values()):
        for quotation, values in says.items():
            for key in values:
                if key not in known:
                    yield _wrong(
                        table,
                        "settings",
                        f"{quotation!r}: {key}",
                        "no recipe has it",
                        did_you_mean(key, known),
                    )


def _said_twice(table: Table, evidence: Evidence, row: str) -> Iterator[Problem]:
    """Yield what settings or errata say twice of a row."""
    said = [("settings", statement.key) for statement in evidence.statements(row)]
    said += [("errata", erratum.difference) for erratum in evidence.errata_of(row)]
    for name, what in dict.fromkeys(each for each in said if said.count(each) > 1):
        yield _wrong(table, name, f"{row}: {what}", "is said twice", "once is enough")


def _wrong(table: Table, part: str, came: str, rule: str, fix: str) -> Problem:
    return Problem(
        f"evidence.{part}", came, rule, fix, where=table.document.at("evidence", part)
    )
