"""The numbers of a step as the screen shows them."""

from __future__ import annotations

from launch.console.numbers import short
from launch.records.metrics import StepRecord


def fields_of(record: StepRecord, *, show_scale: bool) -> dict[str, str]:
    """The numbers of a step for the screen, in their order."""
    loss, masked, norm = record.loss, record.parts.get("mlm_loss"), record.grad_norm
    shown = {
        "skipped": "SKIPPED (overflow)" if record.skipped else "",
        "loss": f"loss {'not finite' if loss is None else f'{loss:.4f}'}",
        "mlm": "" if masked is None else f"mlm {masked:.4f}",
        "lr": f"lr {record.lr:.1e}",
        "norm": f"grad norm {'-' if norm is None else f'{norm:.3g}'}",
        "scale": f"scale {short(record.loss_scale)}" if show_scale else "",
        "samples": f"{short(record.samples_per_s)} samples/s",
        "tokens": f"{short(record.tokens_per_s)} tokens/s",
        "tflops": f"{record.exact_tflops:.3g} TFLOPS",
    }
    return {name: text for name, text in shown.items() if text}
