"""Tables on the screen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

ALIGNMENTS = {"l": "left", "r": "right"}


def aligned(pairs: Iterable[tuple[str, object]], *, indent: int = 0, gap: int = 2) -> str:
    """Labels and values in two columns, `gap` spaces apart, one pair per line."""
    pairs = list(pairs)
    width = max((len(label) for label, _ in pairs), default=0) + gap
    return "\n".join(f"{' ' * indent}{label:<{width}}{value}" for label, value in pairs)


def table(rows: Iterable[Sequence[object]], headings: Sequence[str] = (), align: str = "") -> str:
    """Columns two spaces apart under their headings. `align`: a letter for each, l (the default) or r."""
    columns = [ALIGNMENTS[letter] for letter in align] or None
    return tabulate(
        rows, headings, tablefmt="plain", disable_numparse=True, colalign=columns, headersalign=columns
    )
