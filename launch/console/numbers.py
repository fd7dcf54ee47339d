"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any

NOTHING = "–"  # where nothing was measured


def number(value: Any) -> str:
    """A value in a table: 12,345 for an integer, four significant digits for a float, text as it is."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def short(value: float | None) -> str:
    """A value for a narrow screen: 512, 14.3, 3,657, 65.5k, 1.2M; "-" for None."""
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def loss(value: float | None) -> str:
    """Nats with four decimals, which tell two runs apart where four digits do not."""
    return NOTHING if value is None else f"{value:.4f}"


def ratio(value: float) -> str:
    """0.9873 as "0.987x"; far from 1 three significant digits, so that 5e-06 is not shown as zero."""
    return f"{value:.3f}x" if 0.1 <= value < 10 else f"{value:.3g}x"


def gigabytes(value: float | None) -> float | None:
    """Bytes -> GB (1e9)."""
    return None if value is None else value / 1e9
