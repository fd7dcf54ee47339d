"""A printed number with its digits, and how a recomputed value agrees with it."""

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
    """A number as a document prints it.

    Attributes:
        text: word for word.
        value: the number, in the unit that it is compared in.
        half: half a unit of its last printed digit: what rounding can have hidden.
    """

    text: str
    value: float
    half: float

    @staticmethod
    def read(text: str, factor: float = 1.0, places: int | None = None) -> Printed | None:
        """The first number in `text` ("90.5s", "Baseline (100%)"), times `factor`; None where there is none ("OOM").

        `places`: decimals that it is exact to, where these are not what is printed (-1: to tens, as in "about 340").
        """
        found = _NUMBER.search(text)
        if not found:
            return None
        digits = found.group().replace(",", "")
        decimals = len(digits.partition(".")[2]) if places is None else places
        return Printed(text.strip(), float(digits) * factor, 0.5 * 10.0**-decimals * factor)

    @property
    def unit(self) -> float:
        """One of its last printed digit."""
        return 2 * self.half


def label_unit(label: str) -> float:
    """Parameters in one unit of a size label: 1e9 of "48B", 1e6 of "345M"."""
    return UNITS.get(label.strip()[-1:], 1.0)


def agreement(
    printed: Printed, computed: float, spread: tuple[float, float] | None = None, because: str = "its inputs"
) -> str | None:
    """How `computed` gives the printed number, or None: "exact", "rounded", "truncated", or "within the rounding of ...".

    `spread`: (least, largest) of `computed` over what the printed inputs can have been before they were rounded; `because` names them.
    """
    slack = _SLACK * max(abs(computed), abs(printed.value), 1e-300)
    if abs(computed - printed.value) <= slack:
        return "exact"
    if abs(computed - printed.value) <= printed.half + slack:
        return "rounded"
    if abs(math.floor(computed / printed.unit + _SLACK) * printed.unit - printed.value) <= slack:
        return "truncated"
    if spread and spread[0] - printed.half - slack <= printed.value <= spread[1] + printed.half + slack:
        return f"within the rounding of {because}"
    return None


def spread(formula: Callable[..., float], *inputs: Printed) -> tuple[float, float]:
    """(least, largest) of a formula, monotonic in each input, over the rounding of its printed inputs."""
    corners = itertools.product(*({p.value - p.half, p.value + p.half} for p in inputs))
    values = [formula(*corner) for corner in corners]
    return min(values), max(values)
