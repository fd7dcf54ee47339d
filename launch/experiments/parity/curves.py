"""Plot the loss curve that all layouts share, and their largest difference from one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from launch.experiments.proving.proving import Proven
from launch.records.loss_plot import INK, QUIET, TRAINING, VALIDATION, step_ticks
from recipes.problems import counted

ROUNDING = 4  # units in the last place of the loss in fp32, the height of the band


def draw_curves(proven: Proven, path: Path, title: str) -> None:
    """Draw the losses per step, in nats, and below them the largest absolute difference of any layout.

    Layouts that failed, or have states of another precision, are left out. `path` ends in .png, .svg or .pdf.
    """
    own = np.array([*proven.reference.found.losses.values()])
    precision = proven.reference.task.precision
    compared = []
    for row in proven.rows:
        if not row.failure and row.precision == precision:
            compared.append([*row.losses.values()])
    if not compared:
        return
    steps = np.arange(1, len(own) + 1)
    apart = np.abs(np.array(compared) - own)
    largest = apart.max(axis=0)
    band = ROUNDING * np.spacing(own.astype(np.float32)).astype(float)
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    above.plot(steps, own, color="0.82", linewidth=8)
    for other in compared:
        above.plot(steps, other, color=TRAINING, linewidth=1)
    layouts = counted(len(compared), "layout")
    above.set_title(title, loc="left", color=INK, weight="bold")
    above.set_ylabel("minimised loss (nats)", color=INK)
    below.fill_between(steps, band, step="mid", color="0.9")
    below.step(steps, largest, where="mid", color=VALIDATION)
    below.set_ylabel("difference (nats)", color=INK)
    below.set_xlabel("optimizer step", color=INK)
    below.set_ylim(0, 1.25 * max(largest.max(), band.max()))
    below.xaxis.set_major_locator(step_ticks())
    inside = {"transform": below.transAxes, "va": "top"}
    said = f"{layouts}, largest difference {largest.max():.1e}".replace("e-0", "e-")
    below.text(0.01, 0.97, said, color=VALIDATION, **inside)
    said = f"grey: rounding in fp32, {ROUNDING} units in the last place"
    below.text(0.99, 0.97, said, color=QUIET, ha="right", fontsize=8, **inside)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
