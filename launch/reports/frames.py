"""A table of text, the same for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    """Headings and rows.

    Attributes:
        kinds: of the columns: "name", "text", "number", "change" or "words" (which the page breaks).
        title, note: what stands above.
        style: of the whole table on the page.
    """

    headings: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ""
    note: str = ""
    style: str = "beside"
