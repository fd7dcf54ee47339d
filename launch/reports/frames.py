"""A table of text on a report's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReportTable:
    """A table of text with headings.

    Attributes:
        kinds: of the columns: "name", "text", "number", "change" or "words" (with line breaks).
    """

    headings: tuple[str, ...]
    kinds: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ""
    note: str = ""
    style: str = "beside"
