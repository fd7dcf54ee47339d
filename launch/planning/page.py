"""A page of the planner's answers: facts, tables and notes at the width of the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launch.console import terminal
from launch.console.text_table import aligned, table

INDENT = "  "


class Page:
    """Blocks of text with an empty line between them; `width` in columns, None: lines are left whole."""

    def __init__(self, width: int | None = None):
        self.width = width
        self.blocks: list[str] = []

    def facts(self, *pairs: tuple[str, object]) -> None:
        """Labels and their values in two columns."""
        self._add([aligned(pairs, indent=len(INDENT), width=self.width)])

    def table(
        self,
        rows: Iterable[Sequence[object]],
        headings: Sequence[str] = (),
        align: str = "",
        above: Iterable[str] = (),
        below: Iterable[str] = (),
    ) -> None:
        """A table, as `text_table` makes them, with lines of text right above and below it."""
        width = None if self.width is None else self.width - len(INDENT)
        lines = table(rows, headings, align, width).splitlines()
        self._add([*self._wrapped(above), *(INDENT + line for line in lines), *self._wrapped(below)])

    def text(self, *lines: str, hang: int = 0) -> None:
        """Wrapped lines of text; what follows a break is indented by `hang`."""
        self._add(self._wrapped(lines, hang))

    def notes(self, notes: Iterable[object]) -> None:
        """Notes to the user, each after an exclamation mark."""
        self._add(self._wrapped((f"! {note}" for note in notes), hang=2))

    def commands(self, *lines: str, above: Iterable[str] = (), below: Iterable[str] = ()) -> None:
        """Commands of a shell, with comments between them (#), and lines of text above and below."""
        shown = (
            terminal.wrapped(INDENT + line, self.width)
            if line.startswith("#")
            else terminal.command(INDENT + line, self.width)
            for line in lines
        )
        self._add([*self._wrapped(above), *shown, *self._wrapped(below)])

    def _wrapped(self, lines: Iterable[str], hang: int = 0) -> list[str]:
        return [terminal.wrapped(INDENT + line, self.width, hang=hang) for line in lines]

    def _add(self, lines: Sequence[str]) -> None:
        if any(lines):
            self.blocks.append("\n".join(lines))

    def __str__(self) -> str:
        return "\n\n".join(self.blocks)
