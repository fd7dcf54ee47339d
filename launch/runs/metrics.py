"""What a run reports while it trains: metrics.jsonl, TensorBoard events and the screen. Rank 0 only.

A step's number counts completed optimizer steps: the first step is 1, and 0 means "before training". Numbers that are
not finite (the gradient norm of an overflowed fp16 step) are null in the JSON, since JSON has no infinity.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from torch.utils.tensorboard import SummaryWriter

from launch.console.numbers import _short
from launch.console.progress import Silent, screen
from launch.machine import memory
from launch.runs.directory import RunDirectory
from launch.runs.throughput import Throughput

PART_NAMES = {
    "mlm_loss": "masked tokens",
    "sentence_loss": "sentence objective",
    "sentence_accuracy": "sentence accuracy",
}


class Metrics:
    """Records steps, validations and notes of one launch; `close()` it at the end."""

    def __init__(
        self,
        run_dir: RunDirectory,
        plan: Any,
        *,
        progress: bool,
        start_step: int,
        total_steps: int,
        stream: TextIO | None = None,
    ) -> None:
        """`start_step`: steps done before this launch: 0, or the resumed checkpoint's; what metrics.jsonl holds of
        later ones is dropped. `progress`: show steps on `stream` (standard output), as a bar or, in a log, as lines.
        """
        self._throughput = Throughput(plan)
        self._show_scale = plan.precision == "fp16"
        self._memory_kind = memory.peak_memory().kind
        self._step, self._start_step, self._total_steps = start_step, start_step, total_steps
        run_dir.truncate_metrics(start_step)
        self._file = open(run_dir.metrics_jsonl, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._events = SummaryWriter(
            str(run_dir.tensorboard), purge_step=start_step + 1 if start_step else 0, flush_secs=10
        )
        self._screen = screen(stream or sys.stdout, start_step, total_steps) if progress else Silent()

    def step(
        self,
        step: int,
        loss: float,
        lr: float,
        grad_norm: float | None,
        loss_scale: float | None,
        skipped: bool,
        seconds: float,
        peak_memory_bytes: int,
        parts: Mapping[str, float] | None = None,
        data_seconds: float = 0.0,
    ) -> dict[str, Any]:
        """Record a completed optimizer step and return its line.

        `loss` in nats per token, mean over the global batch; `seconds` of wall time for the step; `skipped`: the loss
        scaler threw the update away; `peak_memory_bytes` as `hardware.peak_memory` counts it; `parts` of the loss by name;
        `data_seconds`: what of `seconds` was spent waiting for the batch.
        """
        assert step == self._step + 1, (
            f"step {step} follows step {self._step}: steps count completed steps, the first is 1"
        )
        self._step = step
        record = {
            "kind": "step",
            "step": step,
            "loss": _finite(loss),
            **_finite_parts(parts),
            "lr": lr,
            "grad_norm": _finite(grad_norm),
            "loss_scale": _finite(loss_scale),
            "skipped": bool(skipped),
            "seconds": seconds,
            "data_seconds": data_seconds,
            **self._throughput.rates(seconds),
            "peak_memory_bytes": peak_memory_bytes,
            "memory_kind": self._memory_kind,
            "launch_step": step - self._start_step,
            "time": time.time(),
        }
        self._write(record)
        self._tensorboard(
            "train",
            record,
            ("loss", *(parts or ()), "lr", "grad_norm", "loss_scale" if self._show_scale else None),
        )
        self._tensorboard(
            "speed",
            record,
            ("seconds", "data_seconds", "samples_per_s", "tokens_per_s", "tflops", "exact_tflops"),
        )
        self._tensorboard("memory", record, ("peak_memory_bytes",))
        self._screen.step(step, self._fields(record))
        return record

    def validation(
        self, step: int, loss: float, parts: Mapping[str, float] | None = None, kind: str = "validation"
    ) -> None:
        """Record the loss on held-out text (nats per token) after `step` completed steps; `kind` "test": on the test split."""
        record = {
            "kind": kind,
            "step": step,
            "loss": _finite(loss),
            **_finite_parts(parts),
            "time": time.time(),
        }
        self._write(record)
        self._tensorboard(kind, record, ("loss", *(parts or ())))
        shown = "".join(f", {PART_NAMES[name]} {value:.4f}" for name, value in (parts or {}).items())
        self._screen.line(f"step {step}: {kind} loss {loss:.4f}{shown}")

    def note(self, text: str) -> None:
        """Record and show one line of text."""
        self._write({"kind": "note", "step": self._step, "text": text, "time": time.time()})
        self._screen.line(text)

    def close(self) -> None:
        """End of the bar and of the files; a second call does nothing."""
        self._screen.close()
        self._events.close()
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        """One line, handed to the system at once: a killed process loses none but the one it was writing."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def _tensorboard(self, group: str, record: dict[str, Any], names: Sequence[str | None]) -> None:
        for name in names:
            if name is not None and record[name] is not None:
                self._events.add_scalar(f"{group}/{name}", record[name], record["step"])

    def _fields(self, record: dict[str, Any]) -> list[str]:
        """The numbers of a step for the screen, short enough that all stand in 80 columns."""
        loss, norm = record["loss"], record["grad_norm"]
        fields = [f"loss {'not finite' if loss is None else f'{loss:.4f}'}"]
        if record.get("mlm_loss") is not None:
            fields.append(f"mlm {record['mlm_loss']:.4f}")
        fields.append(f"lr {record['lr']:.1e}")
        fields.append(f"grad norm {'-' if norm is None else f'{norm:.3g}'}")
        if self._show_scale:
            fields.append(f"scale {_short(record['loss_scale'])}")
        fields.append(f"{_short(record['samples_per_s'])} samples/s")
        fields.append(f"{_short(record['tokens_per_s'])} tokens/s")
        fields.append(f"{record['exact_tflops']:.3g} TFLOPS")
        # First, since a narrow terminal cuts the end off.
        return ["SKIPPED (overflow)", *fields] if record["skipped"] else fields


def _finite_parts(parts: Mapping[str, float] | None) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in (parts or {}).items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
