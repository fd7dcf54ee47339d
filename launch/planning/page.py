"""A page of text from the planner: facts, tables and notes at the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launch.console import terminal
from launch.console.text_table import aligned, table

INDENT = "  "


class Page:
    """Blocks of text with an empty line between them. `width`: in columns; None: unlimited."""

    def __init__(self, width: int | None = None):
        self.width = width
        self.blocks: list[str] = []

    def facts(self, *pairs: tuple[str, object]) -> None:
        """Add labels and their values in two columns."""
        self._add([aligned(pairs, indent=len(INDENT), width=self.width)])

    def table(
        self,
        rows: Iterable[Sequence[object]],
        headings: Sequence[str] = (),
        align: str = "",
        above: Iterable[str] = (),
        below: Iterable[str] = (),
    ) -> None:
        """Add a table of `text_table`, with lines of text right above and below it."""
        width = None if self.width is None else self.width - len(INDENT)
        lines = table(rows, headings, align, width).splitlines()
        self._add(
            [
                *self._wrapped(above),
                *(INDENT + line for line in lines),
                *self._wrapped(below),
            ]
        )

    def text(self, *lines: str, hang: int = 0) -> None:
        """Add wrapped lines of text; continuation lines are indented by `hang`."""
        self._add(self._wrapped(lines, hang))

    def notes(self, notes: Iterable[object]) -> None:
        """Add notes to the user, each after an exclamation mark."""
        self._add(self._wrapped((f"! {note}" for note in notes), hang=2))

    def commands(
        self, *lines: str, above: Iterable[str] = (), below: Iterable[str] = ()
    ) -> None:
        """Add shell commands and comments (#), with lines of text above and below."""
        shown = []
        for line in lines:
            laid_out = terminal.wrapped if line.startswith("#") else terminal.command
            shown.append(laid_out(INDENT + line, self.width))
        self._add([*self._wrapped(above), *shown, *self._wrapped(below)])

    def _wrapped(self, lines: Iterable[str], hang: int = 0) -> list[str]:
        return [
            terminal.wrapped(INDENT + line, self.width, hang=hang) for line in lines
        ]

    def _add(self, lines: Sequence[str]) -> None:
        if any(lines):
            self.blocks.append("\n".join(lines))

    def __str__(self) -> str:
        return "\n\n".join(self.blocks)
