"""One thing that was compared."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["agrees", "disagrees", "not checkable", "computed"]


@dataclass(frozen=True)
class Check:
    """A quantity of a row or of a claim, as printed and as recomputed.

    Attributes:
        table: of the row, or the group of the claim.
        subject: "table/row", or the claim's name after its group.
        status: "computed" is for information: nothing printed stands against it.
        how: how the two agree; why they cannot be compared; of a computed value, what it is.
        transcribed: the recipe is compared with its row's cells and its declarations; nothing is recomputed.
        stated: the recipe is compared with what a text or a public script says of its row; nothing is recomputed.
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
    def line(self) -> str:
        """A disagreement as it is listed, and as errata.yaml names it: a changed digit makes it another one."""
        return f"{self.subject} {self.quantity}: printed {self.printed}, computed {self.computed}"

    def values(self) -> dict[str, Any]:
        return asdict(self)


def compared(table: str, subject: str, quantity: str, printed: str, computed: str, how: str | None) -> Check:
    """Agrees where `how` says in which way."""
    return Check(table, subject, quantity, "agrees" if how else "disagrees", printed, computed, how or "")
