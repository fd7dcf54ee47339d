"""Counts of things, in words."""

from __future__ import annotations

ES = ("s", "x", "ch", "sh")


def counted(number: int, thing: str) -> str:
    """The count as "1 process", "2 processes", "1,024 warm-up steps"."""
    plural = "" if number == 1 else "es" if thing.endswith(ES) else "s"
    return f"{number:,} {thing}{plural}"
