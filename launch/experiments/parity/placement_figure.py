"""What the runs of both placements of LayerNorm came to: a table and the figure of their losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from launch.records.loss_plot import averaged, moving_average, step_ticks
from launch.records.metrics import curve, read_metrics
from launch.records.result import read_result

PLACEMENTS = {"post": "original (a): post-LN", "pre": "rearranged (b): pre-LN"}
COLORS = ("tab:red", "tab:blue")
COLUMNS = (
    "status", "steps", "train_mlm_loss", "validation_mlm_loss", "validation_sentence_loss",
    "seconds_per_step",
)  # fmt: skip


def summarise(directory: Path) -> dict[str, Any]:
    """What the table shows of one run."""
    result = read_result(directory / "result.json")
    trained, validation = result.losses.training.parts or {}, result.losses.validation
    held_out = (validation.parts if validation else None) or {}
    return {
        "status": result.status,
        "steps": result.steps,
        "parameters": result.parameters,
        "train_mlm_loss": trained.get("mlm_loss"),
        "validation_mlm_loss": held_out.get("mlm_loss"),
        "validation_sentence_loss": held_out.get("sentence_loss"),
        "unigram_entropy": result.entropies.unigram,
        "seconds_per_step": result.speed.seconds_per_step,
        "deviations": [str(each) for each in result.deviations],
    }


def table(summary: dict[str, dict[str, Any]]) -> str:
    """A line for each placement, and the entropy that a model without context reaches."""
    lines = [f"{'placement':<24}" + "".join(f"{name:>26}" for name in COLUMNS)]
    for placement, row in summary.items():
        lines.append(f"{PLACEMENTS[placement]:<24}" + "".join(f"{_cell(row[c]):>26}" for c in COLUMNS))
    entropy = summary["pre"]["unigram_entropy"]
    return "\n".join([*lines, f"unigram entropy of the validation predictions: {entropy:.4f} nats"])


def _cell(value: Any) -> str:
    return "not measured" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def plot(runs: dict[str, Path], unigram_entropy: float, out_png: Path, title: str) -> None:
    """Masked-token loss of each run: every step faint, its moving average on top, validation as points.

    `runs`: metrics.jsonl by label.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")  # draws by Agg, as any without pyplot
    axes = figure.add_subplot()
    for (label, path), color in zip(runs.items(), COLORS, strict=True):
        records = read_metrics(path)
        train = curve(records.steps, "mlm_loss")
        steps, losses = zip(*train, strict=True) if train else ((), ())  # a run can diverge in its first step
        label = f"{label}, {averaged(len(losses))}" if train else f"{label}: diverged at once"
        axes.plot(steps, losses, linewidth=0.5, alpha=0.35, color=color)
        axes.plot(steps, moving_average(losses), linewidth=1.8, color=color, label=label)
        if held_out := curve(records.validations, "mlm_loss"):
            axes.plot(*zip(*held_out, strict=True), "o", markersize=4, color=color)
    axes.axhline(unigram_entropy, linestyle=":", color="gray", linewidth=1, label="unigram entropy")
    axes.set(xlabel="optimizer step", ylabel="loss (nats per masked token)", title=title)
    axes.xaxis.set_major_locator(step_ticks())
    axes.grid(alpha=0.2)
    axes.legend()
    figure.savefig(out_png, dpi=120)
