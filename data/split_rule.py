"""The split into training, validation and test documents, by only the document's index.

Whole documents are held out, so that training sees no held-out text. The rule does not need the number of
documents, so that it holds for streams too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
"""Names of the numbers in the result of `parts`."""


def part_of(index: int, validation_every: int, test_every: int | None = None) -> Part:
    """Return the part of the document at `index` of its source, from 0.

    Every `validation_every`-th document (2 or more) is for validation. The others are counted anew, and every
    `test_every`-th of them (2 or more; None: no test part) is for the test, beginning with the first.
    """
    if index % validation_every == validation_every - 1:
        return "validation"
    left_before = index - index // validation_every
    return (
        "test" if test_every is not None and left_before % test_every == 0 else "train"
    )


def parts(
    indices: np.ndarray, validation_every: int, test_every: int | None = None
) -> np.ndarray:
    """Return the positions in `PARTS`, (N,) uint8, of documents `indices` (N,); see `part_of`."""
    import numpy as np

    assert validation_every >= 2 and (test_every is None or test_every >= 2), (
        "the schema refuses 1"
    )
    found = (indices % validation_every == validation_every - 1).astype(np.uint8)
    if test_every is not None:
        # Counting what validation leaves, and not all documents, keeps 1/test_every of it whatever divisors
        # the two have in common.
        left_before = indices - indices // validation_every
        found[(found == 0) & (left_before % test_every == 0)] = PARTS.index("test")
    return found


def documents_of(
    part: Part, documents: int, validation_every: int, test_every: int | None = None
) -> np.ndarray:
    """Return the indices (N,) int64, ascending, of one part's documents among `documents` documents."""
    import numpy as np

    found = parts(np.arange(documents, dtype=np.int64), validation_every, test_every)
    return np.flatnonzero(found == PARTS.index(part))
