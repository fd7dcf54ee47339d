"""A table of text for the Markdown and the HTML report, and its Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class ReportTable:
    """A table of text with headings.

    Attributes:
        kinds: of the columns: "name", "text", "number", "change" or "words" (with line breaks in HTML).
    """

    headings: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ""
    note: str = ""
    style: str = "beside"


def text(value: object) -> str:
    """Return the value as one line, escaped for Markdown and HTML."""
    return re.sub(
        r"([\\`*_\[\]|~$])", r"\\\1", escape(" ".join(str(value).split()), quote=False)
    )


def bullets(lines: Iterable[object]) -> str:
    return "\n".join(f"- {text(line)}" for line in lines)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the cells are Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def blocks(frame: ReportTable) -> list[str]:
    """Return title, note and table as Markdown."""
    title = f"**{frame.title}**" if frame.title else ""
    rows = [[*map(text, row)] for row in frame.rows]
    return [
        title,
        frame.note,
        table([*map(text, frame.headings)], rows) if rows else "Nothing.",
    ]
