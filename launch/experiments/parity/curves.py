"""Plot the loss curves of all layouts, and their differences from one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.figure import Figure

from launch.experiments.parity.comparison import RunOutcome

LEAST = 1e-9  # smaller differences, zero included, are drawn at the lower edge


def draw_curves(
    reference: RunOutcome, others: Sequence[RunOutcome], path: Path, title: str
) -> None:
    """Draw the losses per step, in nats, and below their absolute differences from the reference.

    Layouts without a full training are left out. `path` ends in .png, .svg or .pdf.
    """
    compared = [other for other in others if len(other.losses) == len(reference.losses)]
    steps = range(1, len(reference.losses) + 1)
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    above.plot(steps, reference.losses, color="0.82", linewidth=8, label="one process")
    for number, other in enumerate(compared):
        color = colormaps["turbo"]((number + 0.5) / len(compared))
        above.plot(steps, other.losses, color=color, linewidth=0.8)
        pairs = zip(other.losses, reference.losses, strict=True)
        below.plot(
            steps,
            [max(LEAST, abs(a - b)) for a, b in pairs],
            color=color,
            linewidth=0.8,
        )
    above.set(ylabel="minimised loss (nats)", title=title)
    above.legend(
        [f"one process, and on top of it {len(compared)} layouts"], frameon=False
    )
    below.set(
        ylabel="difference", xlabel="optimizer step", yscale="log", ylim=(LEAST, 1e-3)
    )
    below.yaxis.set_major_formatter("{x:.0e}")
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
