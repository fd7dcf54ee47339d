"""Numbers as text for people."""

from __future__ import annotations

import math
from typing import Any

NOTHING = "–"  # for a missing value


def number(value: Any) -> str:
    """Write a value for a table: integers as 12,345, floats with four significant digits, text as it is."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return (
            f"{value:,.0f}"
            if math.isfinite(value) and abs(value) >= 1000
            else f"{value:.4g}"
        )
    return str(value)


def short(value: float | None) -> str:
    """Write a value for a narrow screen: 512, 14.3, 3,657, 65.5k, 1.2M; "-" for None."""
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def loss(value: float | None) -> str:
    """Write nats with four decimals, since four digits would not tell two runs apart."""
    return NOTHING if value is None else f"{value:.4f}"


def ratio(value: float) -> str:
    """Write 0.9873 as "0.987x"; far from 1 with three significant digits, so that 5e-06 is not zero."""
    return f"{value:.3f}x" if 0.1 <= value < 10 else f"{value:.3g}x"


def gigabytes(value: float | None) -> float | None:
    """Convert bytes to GB (1e9)."""
    return None if value is None else value / 1e9
