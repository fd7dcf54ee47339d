"""Numbers as a reader wants them: four digits, thousands apart, nothing where nothing was measured."""

from __future__ import annotations

import math
from typing import Any

from launch.console import numbers

NOTHING = "–"


def number(value: Any) -> str:
    """As `metrics.number` writes it, `NOTHING` for None."""
    return NOTHING if value is None else numbers.number(value)


def loss(value: Any) -> str:
    """Nats per token with four decimals, which tell two runs apart where four digits do not."""
    return f"{value:.4f}" if is_number(value) else number(value)


def ratio(value: float) -> str:
    """0.9873 as "0.987x"; what is not near 1 with three significant digits, so that 5e-06 is not shown as zero."""
    return f"{value:.3f}x" if 0.1 <= value < 10 else f"{value:.3g}x"


def gigabytes(value: Any) -> float | None:
    """Bytes -> GB (1e9)."""
    return value / 1e9 if is_number(value) else None


def is_number(value: Any) -> bool:
    """A finite number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
