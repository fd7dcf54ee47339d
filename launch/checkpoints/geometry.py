"""The place of a piece in its tensor, as rectangles.

A piece is a run of consecutive elements of one rank's tensor-parallel slice. A tensor is seen as a matrix:
its first dimension by the rest. A run in a slice of this matrix is at most three rectangles: the end of a
row, whole rows, the beginning of a row. Two pieces of two layouts share the intersections of their
rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

Whole = Annotated[int, Field(ge=0, lt=2**63)]


class Cut(NamedTuple):
    """A slice of `length` entries of dimension `dim` from `start` on; its end may be padding."""

    dim: Whole
    start: Whole
    length: Whole


class Rectangle(NamedTuple):
    """Rows [top, bottom) and columns [left, right) of a tensor within a piece.

    `at`: the place of its first element in the piece; `stride`: elements of the piece from row to row.
    """

    top: int
    bottom: int
    left: int
    right: int
    at: int
    stride: int

    @property
    def elements(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


class Copy(NamedTuple):
    """A rectangle of elements common to two pieces, with offset and stride in each."""

    rows: int
    columns: int
    source: int
    source_stride: int
    target: int
    target_stride: int


def rectangles(
    shape: Sequence[int], cut: Cut | None, first: int, count: int
) -> list[Rectangle]:
    """Return the rectangles of elements [first, first + count) of a slice, without padding.

    `shape`: of the full tensor; `cut` None: the slice is the full tensor. A cut of another dimension than the
    first needs a matrix.
    """
    rows, columns = matrix(shape)
    top, left, height, width = _slice(shape, cut)
    assert min(first, count) >= 0 and first + count <= height * width, (
        f"{first}+{count} of {height}x{width}"
    )
    found = []
    at = first
    end = first + count
    while at < end:
        row, column = divmod(at, width)
        taken = min(width - column, end - at)
        lines = 1
        if taken == width:
            lines = (end - at) // width
        bottom = min(top + row + lines, rows)
        right = min(left + column + taken, columns)
        whole = Rectangle(top + row, bottom, left + column, right, at - first, width)
        if whole.top < bottom and whole.left < right:
            found.append(whole)
        at += lines * taken
    return found


def run_around(shape: Sequence[int], cut: Cut | None, wanted: Rectangle) -> range:
    """Return the elements of a slice from the first that is in a rectangle of the tensor to the last."""
    top, left, height, width = _slice(shape, cut)
    rows = range(max(wanted.top - top, 0), min(wanted.bottom - top, height))
    columns = range(max(wanted.left - left, 0), min(wanted.right - left, width))
    if not rows or not columns:
        return range(0)
    return range(rows[0] * width + columns[0], rows[-1] * width + columns[-1] + 1)


def copies(source: Iterable[Rectangle], target: Sequence[Rectangle]) -> Iterator[Copy]:
    """Yield the copies from one piece into another of the same tensor."""
    for have in source:
        for want in target:
            top = max(have.top, want.top)
            bottom = min(have.bottom, want.bottom)
            left = max(have.left, want.left)
            right = min(have.right, want.right)
            if top < bottom and left < right:
                places = (
                    (r.at + (top - r.top) * r.stride + left - r.left, r.stride)
                    for r in (have, want)
                )
                (there, there_stride), (here, here_stride) = places
                yield Copy(
                    bottom - top, right - left, there, there_stride, here, here_stride
                )


def overlap(pieces: Iterable[Rectangle]) -> bool:
    """Check whether two of the rectangles share an element."""
    open_: list[Rectangle] = []
    for each in sorted(pieces):
        open_ = [other for other in open_ if other.bottom > each.top]
        if any(
            max(each.left, other.left) < min(each.right, other.right) for other in open_
        ):
            return True
        open_.append(each)
    return False


def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """Return (first, number) of the elements in `part` of `parts` parts of `count`, the last ones shorter."""
    each = -(-count // parts)
    first = min(count, part * each)
    return first, min(count - first, each)


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor seen as a matrix: its first dimension by the rest."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


def _slice(shape: Sequence[int], cut: Cut | None) -> tuple[int, int, int, int]:
    """Return first row and column, height and width of a slice in the tensor's matrix."""
    rows, columns = matrix(shape)
    if cut is None:
        return 0, 0, rows, columns
    assert cut.dim == 0 or (cut.dim == 1 and len(shape) == 2), (
        f"{cut} of a tensor of {list(shape)}"
    )
    if cut.dim == 0:
        return cut.start, 0, cut.length, columns
    return 0, cut.start, rows, cut.length
