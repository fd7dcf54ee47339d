"""One thing that was compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["agrees", "disagrees", "not checkable", "computed"]


@dataclass(frozen=True)
class Check:
    """A quantity of a row, as printed and as recomputed.

    Attributes:
        subject: the row, as "table/row".
        status: "computed" is for information: nothing printed stands against it.
        how: how the two agree; why they cannot be compared; of a computed value, what it is.
        transcribed: compares the recipe with its row's cells and its declarations; recomputes nothing.
        stated: compares the recipe with what a text or a public script says of its row; recomputes nothing.
    """

    table: str
    subject: str
    quantity: str
    status: Status
    printed: str = ""
    computed: str = ""
    how: str = ""
    transcribed: bool = False
    stated: bool = False

    @property
    def difference(self) -> str:
        """What differs, without the row."""
        return difference(self.quantity, self.printed, self.computed)


def difference(quantity: str, printed: str, computed: str) -> str:
    """What differs, in one phrase."""
    return f"{quantity}: printed {printed}, computed {computed}"
