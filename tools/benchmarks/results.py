"""The one form of what is measured: rows, each with all its numbers, and tables that show some of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from launch.console import text_table

Row = dict[str, Any]


class Column(NamedTuple):
    """A column of a table: a field of the rows, the format of its values, and the unit they are shown in."""

    heading: str
    field: str
    form: str = "{}"
    unit: float | None = None

    def cell(self, row: Row) -> str:
        """Return the value of a row as text; "-" without one."""
        value = row.get(self.field)
        if value is None:
            return "-"
        if self.unit:
            value /= self.unit
        return self.form.format(value)


def table(rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """Return a table of the rows: names in the first column, numbers in the others."""
    cells = [[column.cell(row) for column in columns] for row in rows]
    headings = [column.heading for column in columns]
    return text_table.table(cells, headings, "l" + "r" * (len(columns) - 1))


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the file that all rows are written to."""
    parser.add_argument(
        "--out", metavar="FILE", help="write all numbers as JSON, again after each row"
    )
