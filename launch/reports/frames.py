"""A table of text for the Markdown and the HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
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
