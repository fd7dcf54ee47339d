"""A page of text: facts, tables and lines in blocks, at the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launch.console import terminal
from launch.console.text_table import aligned, table


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
