"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any) -> str:
    """As tables show it: 12,345 for an integer, four significant digits for a float, yes or no; text as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _short(value: float | None) -> str:
    """512, 14.3, 3,657, 65.5k, 1.2M; "-" for None."""
    if value is None:
        return "-"
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    if value >= 1e4:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
