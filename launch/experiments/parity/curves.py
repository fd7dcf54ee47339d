"""The loss curves of all layouts on top of each other, and how far each is from one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launch.experiments.parity.comparison import Outcome

LEAST = 1e-9  # differences below, none among them, stand at the lower edge


def draw_curves(reference: Outcome, others: Sequence[Outcome], path: Path, title: str) -> None:
    """Draw the losses per step and, below, their absolute differences from the reference, in nats per token.

    A layout that did not train is left out. `path` ends in what matplotlib can write: .png, .svg, .pdf.
    """
    compared = [other for other in others if len(other.losses) == len(reference.losses)]
    steps = range(1, len(reference.losses) + 1)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    above.plot(steps, reference.losses, color="0.82", linewidth=8, label="one process")
    for number, other in enumerate(compared):
        color = colormaps["turbo"]((number + 0.5) / len(compared))
        above.plot(steps, other.losses, color=color, linewidth=0.8)
        pairs = zip(other.losses, reference.losses, strict=True)
        below.plot(steps, [max(LEAST, abs(a - b)) for a, b in pairs], color=color, linewidth=0.8)
    above.set(ylabel="loss, nats per token", title=title)
    above.legend([f"one process, and on top of it {len(compared)} layouts"], frameon=False)
    below.set(ylabel="difference", xlabel="optimizer step", yscale="log", ylim=(LEAST, 1e-3))
    below.yaxis.set_major_formatter("{x:.0e}")
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=120)
