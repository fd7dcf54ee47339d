"""Tables as text, the numbers in them, and pages of tables, facts and lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from launch.console import terminal
from launch.console.terminal import wrapped
from recipes.problems import visible

NOTHING = "–"  # for a missing value
ALIGNMENTS = {"l": "left", "r": "right"}
PADDING = 2  # added to headings by tabulate
DURATIONS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
LEAST_WRAPPED = 16  # columns; a narrower last column is hard to read


def number(value: Any) -> str:
    """Write a value for a table: integers as 12,345, floats with four significant digits, text as it is."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return (
            f"{value:,.0f}"
            if math.isfinite(value) and abs(value) >= 1000
            else f"{value:.4g}"
        )
    return str(value)


def short(value: float | None) -> str:
    """Write a value for a narrow screen: 512, 14.3, 3,657, 65.5k, 1.2M, 8.3B; "-" for None."""
    if value is None:
        return "-"
    if value >= 1e9:
        return f"{value / 1e9:.3g}B"
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def flops(tflops: float | None) -> str:
    """Write a rate of 1e12 operations a second as "36.2 TFLOPS", below 1 as "12.3 GFLOPS"; "-" for None."""
    if tflops is None:
        return NOTHING
    return f"{tflops:.4g} TFLOPS" if tflops >= 1 else f"{1e3 * tflops:.4g} GFLOPS"


def loss(value: float | None) -> str:
    """Write nats with four decimals, since four digits would not tell two runs apart."""
    return NOTHING if value is None else f"{value:.4f}"


def ratio(value: float) -> str:
    """Write 0.9873 as "0.987x"; far from 1 with three significant digits, so that 5e-06 is not zero."""
    return f"{value:.3f}x" if 0.1 <= value < 10 else f"{value:.3g}x"


def duration(seconds: float) -> str:
    """Write a duration in the largest unit that it fills."""
    for unit, size in DURATIONS.items():
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds:,.3g} seconds"


def gigabytes(value: float | None) -> float | None:
    """Convert bytes to GB (1e9)."""
    return None if value is None else value / 1e9


def aligned(
    pairs: Iterable[tuple[str, object]],
    *,
    indent: int = 0,
    gap: int = 2,
    width: int | None = None,
) -> str:
    """Align labels and values in two columns, `gap` spaces apart, one pair per line.

    Lines longer than `width` are wrapped.
    """
    pairs = list(pairs)
    column = max((len(label) for label, _ in pairs), default=0) + gap
    lines = (f"{' ' * indent}{label:<{column}}{value}" for label, value in pairs)
    return "\n".join(wrapped(visible(line), width, hang=column) for line in lines)


def table(
    rows: Iterable[Sequence[object]],
    headings: Sequence[str] = (),
    align: str = "",
    width: int | None = None,
) -> str:
    """Make a table with columns two spaces apart. `align`: l (the default) or r for each column.

    A table wider than `width` wraps its headings and its last column. If that is not enough, each row becomes
    a paragraph, with its first cell on the first line.
    """
    cells = [list(map(visible, map(str, row))) for row in rows]
    whole = _tabulated(cells, headings, align)
    if width is None or max(map(len, whole.splitlines()), default=0) <= width:
        return whole
    widths = [max(map(len, own)) for own in zip(*cells, strict=True)]
    for column, heading in enumerate(headings):
        word = max(map(len, heading.split()), default=0)
        widths[column] = max(widths[column], word + PADDING)
    last = width - sum(widths[:-1]) - 2 * (len(widths) - 1)
    if last >= min(widths[-1], LEAST_WRAPPED):
        widths[-1] = min(last, widths[-1])
        sizes = [size - PADDING for size in widths]
        headings = list(map(_fill, headings, sizes))
        for row in cells:
            row[-1] = _fill(row[-1], widths[-1])
        return _tabulated(cells, headings, align)
    named = [heading.strip() for heading in headings] or [""] * len(widths)
    return "\n".join(wrapped(_paragraph(row, named), width) for row in cells)


class Page:
    """Blocks of text with an empty line between them, `indent` columns from the left.

    Each block takes lines of text right `above` and `below` it, and at the left edge those of its `heading`.
    `width`: in columns; None: unlimited.
    """

    def __init__(self, width: int | None = None, indent: int = 2):
        self.width = width
        self.margin = " " * indent
        self.blocks: list[str] = []

    def facts(
        self, *pairs: tuple[str, object], gap: int = 2, **around: Iterable[str]
    ) -> None:
        """Add labels and their values in two columns, `gap` apart."""
        indent = len(self.margin)
        shown = aligned(pairs, indent=indent, gap=gap, width=self.width)
        self.add([shown], **around)

    def table(
        self,
        rows: Iterable[Sequence[object]],
        headings: Sequence[str] = (),
        align: str = "",
        **around: Iterable[str],
    ) -> None:
        """Add a table of `text_table`."""
        width = None if self.width is None else self.width - len(self.margin)
        lines = table(rows, headings, align, width).splitlines()
        self.add([self.margin + line for line in lines], **around)

    def text(self, *lines: str, hang: int = 0, **around: Iterable[str]) -> None:
        """Add wrapped lines of text, but for empty ones; continued lines are indented by `hang`."""
        self.add(self._wrapped(filter(None, lines), hang), **around)

    def notes(self, notes: Iterable[object]) -> None:
        """Add notes to the user, each after an exclamation mark."""
        self.text(*(f"! {note}" for note in notes), hang=2)

    def commands(self, *lines: str, **around: Iterable[str]) -> None:
        """Add shell commands and comments (#)."""
        shown = []
        for line in lines:
            laid_out = terminal.wrapped if line.startswith("#") else terminal.command
            shown.append(laid_out(self.margin + line, self.width))
        self.add(shown, **around)

    def add(
        self,
        lines: Sequence[str],
        above: Iterable[str] = (),
        below: Iterable[str] = (),
        heading: Iterable[str] = (),
    ) -> None:
        """Add lines that are laid out; nothing without lines."""
        block = [*self._wrapped(above), *lines, *self._wrapped(below)]
        if any(block):
            edge = [terminal.wrapped(line, self.width) for line in heading]
            self.blocks.append("\n".join([*edge, *block]))

    def _wrapped(self, lines: Iterable[str], hang: int = 0) -> list[str]:
        return [
            terminal.wrapped(self.margin + each, self.width, hang) for each in lines
        ]

    def __str__(self) -> str:
        return "\n\n".join(self.blocks)


def _tabulated(
    cells: Sequence[Sequence[str]], headings: Sequence[str], align: str
) -> str:
    columns = [ALIGNMENTS[letter] for letter in align] or None
    how = {"disable_numparse": True, "colalign": columns, "headersalign": columns}
    return tabulate(cells, headings, tablefmt="plain", **how)  # type: ignore[arg-type]


def _fill(cell: str, width: int) -> str:
    return textwrap.fill(cell, width, break_long_words=False, break_on_hyphens=False)


def _paragraph(row: Sequence[str], headings: Sequence[str]) -> str:
    """A row as its first cell, and below it the others that are not empty, each after its heading."""
    said = (
        f"{heading} {cell}".strip()
        for heading, cell in zip(headings[1:], row[1:], strict=True)
        if cell
    )
    return f"{row[0]}\n  {' | '.join(said)}"
