"""Printed numbers with their digits, and their agreement with recomputed values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_SLACK = 1e-9  # relative: of the binary representation, not of the source
UNITS = {"B": 1e9, "M": 1e6, "k": 1e3}


@dataclass(frozen=True)
class Printed:
    """A number as printed by a document.

    Attributes:
        value: the number in the unit of the comparison.
        half: half a unit of its last printed digit, the most that rounding can hide.
    """

    text: str
    value: float
    half: float

    @staticmethod
    def read(text: str, factor: float = 1.0) -> Printed | None:
        """Read the first number in `text` ("90.5s", "Baseline (100%)") times `factor`; None for "OOM"."""
        number = _NUMBER.search(text)
        if not number:
            return None
        digits = number.group().replace(",", "")
        half = 0.5 * 10.0 ** -len(digits.partition(".")[2])
        return Printed(text.strip(), float(digits) * factor, half * factor)


def size_unit(label: str) -> float:
    """Return the parameters in one unit of a size label: 1e9 of "48B", 1e6 of "345M"."""
    return UNITS.get(label.strip()[-1:], 1.0)


def agreement(
    printed: Printed,
    computed: float,
    spread: tuple[float, float] | None = None,
    because: str = "its inputs",
) -> str | None:
    """Name the agreement of a computed and a printed number: "exact", "rounded", …; None: they differ.

    `spread`: (least, largest) of `computed` over what its printed inputs (`because`) were unrounded.
    """
    slack = _SLACK * max(abs(computed), abs(printed.value), 1e-300)
    unit = 2 * printed.half
    if abs(computed - printed.value) <= slack:
        return "exact"
    if abs(computed - printed.value) <= printed.half + slack:
        return "rounded"
    if abs(math.floor(computed / unit + _SLACK) * unit - printed.value) <= slack:
        return "truncated"
    if (
        spread
        and spread[0] - printed.half - slack
        <= printed.value
        <= spread[1] + printed.half + slack
    ):
        return f"within the rounding of {because}"
    return None


def recompute(
    printed: Printed, because: str, formula: Callable[..., float], *inputs: Printed
) -> tuple[float, str | None]:
    """Return the value of a formula of printed numbers, and its agreement with the printed one.

    The formula is monotonic in each input; `because` names the inputs, whose rounding may explain the rest.
    """
    computed = formula(*(number.value for number in inputs))
    corners = itertools.product(*((n.value - n.half, n.value + n.half) for n in inputs))
    values = [formula(*corner) for corner in corners]
    return computed, agreement(printed, computed, (min(values), max(values)), because)
