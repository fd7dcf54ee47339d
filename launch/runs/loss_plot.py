"""The loss curve of a run, drawn from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launch.runs.metrics import Records, curve

SMOOTHING = 0.9  # weight of the past in the exponential moving average
UNITS = {"loss": "loss (nats per token)", "mlm_loss": "loss (nats per masked token)"}


def plot_loss(records: Records, out_png: Path, reference_lines: Mapping[str, float], title: str = "") -> None:
    """Draw training loss, its moving average, validation points and references; a BERT's masked-token loss.

    `reference_lines`: label -> nats per token, such as the entropies of a uniform and a unigram model.
    """
    train, validation = (curve(each, records.part) for each in (records.steps, records.validations))
    # Figure and canvas by hand: pyplot would keep a global state and ask for a display.
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, linewidth=0.6, alpha=0.5, color="tab:blue", label="training, each step")
        smooth = moving_average(losses)
        axes.plot(steps, smooth, linewidth=1.8, color="tab:blue", label="training, moving average")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", markersize=4, color="tab:orange", label="validation")
    _draw_references(axes, reference_lines)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(UNITS[records.part])
    axes.set_title(title)
    axes.grid(alpha=0.2)
    if train or validation:
        axes.legend(loc="upper right")
    figure.savefig(out_png, dpi=120)


def moving_average(values: Sequence[float]) -> list[float]:
    """Exponential moving average whose weights sum to 1, without a bias towards its start."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(total / weight)
    return smoothed


def _draw_references(axes: Axes, reference_lines: Mapping[str, float]) -> None:
    styles = ("--", ":", "-.") * len(reference_lines)
    for (label, value), style in zip(reference_lines.items(), styles, strict=False):
        axes.axhline(value, linestyle=style, color="gray", linewidth=1)
        axes.annotate(
            f"{label} {value:.2f}", xy=(0.35, value), xycoords=axes.get_yaxis_transform(), xytext=(0, 3),
            textcoords="offset points", fontsize=9, color="gray",
        )  # fmt: skip
