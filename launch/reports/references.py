"""Entropies of a uniform and of a unigram model beside the curves of losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launch.reports.svg import FAINT, INK

NEAR = 0.5  # of the curves' own range: a reference that is further away is named at the edge, and takes nothing of the axis
LEAST_RANGE = 0.2  # nats: curves that are flat are no reason to call a reference far away


def draw_references(axes, entropies: Mapping[tuple[str, float], Sequence[str]], runs: int) -> bool:
    """A grey line for each (kind, nats) -> labels of its runs, or an arrow with its number; True where there is such an arrow.

    Call it after the curves are drawn. `runs`: how many they are of; a reference of one of several runs names it.
    """
    values = [float(y) for line in axes.get_lines() for y in line.get_ydata()]
    bottom, top = (min(values), max(values)) if values else (0.0, float("inf"))
    reach = NEAR * max(top - bottom, LEAST_RANGE)
    outside = {1: 0, -1: 0}  # arrows so far at the top, at the bottom
    for (kind, value), names in entropies.items():
        whose = f" ({names[0]})" if len(names) < runs and len(names) == 1 else ""
        if bottom - reach <= value <= top + reach:
            axes.axhline(value, color=FAINT, linestyle=":" if kind == "unigram" else "--", linewidth=1.2)
            axes.annotate(
                f"{kind} {value:.3f}{whose}", (0.99, value), xycoords=axes.get_yaxis_transform(), xytext=(0, 3),
                textcoords="offset points", ha="right", fontsize=8, color=INK,
            )  # fmt: skip
            continue
        side = 1 if value > top else -1
        offset = 4 + 11 * outside[side]
        outside[side] += 1
        # Losses fall from the upper left to the lower right: the other two corners are empty.
        arrow, x, y, ha, va = ("↑", 0.99, 1, "right", "top") if side > 0 else ("↓", 0.01, 0, "left", "bottom")
        axes.annotate(
            f"{kind} {value:.3f}{whose} {arrow}", (x, y), xycoords="axes fraction", xytext=(0, -side * offset),
            textcoords="offset points", ha=ha, va=va, fontsize=8, color=INK,
        )  # fmt: skip
    return any(outside.values())
