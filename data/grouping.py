"""Items gathered into lists that are worth one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def grouped(items: Iterable[T], size: Callable[[T], int], least: int) -> Iterator[list[T]]:
    """Items in order, in lists whose sizes sum to at least `least`; the last list may hold less, and none is empty."""
    group: list[T] = []
    held = 0
    for item in items:
        group.append(item)
        held += size(item)
        if held >= least:
            yield group
            group, held = [], 0
    if group:
        yield group
