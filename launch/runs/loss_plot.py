"""The loss curve of a run, drawn from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launch.runs.directory import read_metrics

SMOOTHING = 0.9  # weight of the past in the exponential moving average


def plot_loss(
    metrics_jsonl: Path, out_png: Path, reference_lines: Mapping[str, float], title: str = ""
) -> None:
    """Draw training loss, its moving average, validation points and a horizontal line per reference; of a BERT the masked-token loss.

    `reference_lines`: label -> nats per token, such as the entropies of a uniform and a unigram model.
    """
    records = [record for record in read_metrics(metrics_jsonl) if record.get("loss") is not None]
    key = "mlm_loss" if any(record.get("mlm_loss") is not None for record in records) else "loss"
    train, validation = (curve(records, kind, key) for kind in ("step", "validation"))
    # Figure and canvas by hand: pyplot would keep a global state and ask for a display.
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = zip(*train, strict=True)
        axes.plot(steps, losses, linewidth=0.6, alpha=0.5, color="tab:blue", label="training, each step")
        axes.plot(
            steps, moving_average(losses), linewidth=1.8, color="tab:blue", label="training, moving average"
        )
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", markersize=4, color="tab:orange", label="validation")
    _draw_references(axes, reference_lines)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)" if key == "loss" else "loss (nats per masked token)")
    axes.set_title(title)
    axes.grid(alpha=0.2)
    if train or validation:
        axes.legend(loc="upper right")
    figure.savefig(out_png, dpi=120)


def curve(records: Sequence[Mapping], kind: str, key: str) -> list[tuple[int, float]]:
    """(step, value) of the records of one kind that have a finite value."""
    return [
        (record["step"], record[key])
        for record in records
        if record["kind"] == kind and record.get(key) is not None
    ]


def moving_average(values: Sequence[float]) -> list[float]:
    """Exponential moving average without the bias towards its start (the weights of the values seen sum to 1)."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smoothed.append(total / weight)
    return smoothed


def _draw_references(axes: Axes, reference_lines: Mapping[str, float]) -> None:
    for (label, value), style in zip(
        reference_lines.items(), ("--", ":", "-.") * len(reference_lines), strict=False
    ):
        axes.axhline(value, linestyle=style, color="gray", linewidth=1)
        axes.annotate(
            f"{label} {value:.2f}",
            xy=(0.35, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=9,
            color="gray",
        )
