"""Comparing two runs of one recipe: losses, gradient norms, gradients of the first step and final weights."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

LOSS_TOLERANCE = 1e-4  # nats per token, at every step
NORM_TOLERANCE = 1e-4  # relative, at every step
GRADIENT_TOLERANCE = 1e-4  # L2 norm of the difference, relative to that of the tensor
COMPILED = " compiled"  # ends the name of a layout that was run with compiled layers
WEIGHT_TOLERANCE = 1e-3  # the same, of the final weights: Adam amplifies rounding where gradients are small


@dataclass(frozen=True)
class Outcome:
    """What a run left. `failure` says why there is nothing to compare."""

    name: str
    processes: int
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    seconds: float = math.nan  # median per step, the first five left out
    failure: str | None = None


@dataclass(frozen=True)
class Difference:
    """How far a run is from the reference."""

    name: str
    processes: int
    loss: float  # largest absolute difference over the steps
    norm: float  # largest relative difference over the steps
    gradient: float  # largest relative difference over the tensors, first step
    weight: float  # largest absolute difference of an element of the final weights
    diverging: (
        str | None
    )  # first tensor that differs by more than the tolerance: gradients in backward, weights in forward order
    agrees: bool
    seconds: float = math.nan
    failure: str | None = None


def read_outcome(name: str, processes: int, directory: Path, log: Path) -> Outcome:
    from launch.checkpoints.weights import load_tensors
    from launch.runs.directory import read_metrics

    refused = directory / "refused.txt"
    if refused.exists():
        return _failed(name, processes, refused.read_text())
    try:
        steps = [r for r in read_metrics(directory / "metrics.jsonl") if r["kind"] == "step"]
        newest = sorted((directory / "checkpoints").glob("step-*/complete.json"))[-1].parent
        gradients, weights = load_tensors(directory, "gradients-stage-*.safetensors"), load_tensors(newest)
    except (FileNotFoundError, IndexError):
        return _failed(name, processes, f"did not finish: {_last_error(log)}")
    losses = [math.nan if r["loss"] is None else r["loss"] for r in steps]
    norms = [math.nan if r["grad_norm"] is None else r["grad_norm"] for r in steps]
    return Outcome(
        name,
        processes,
        losses,
        norms,
        gradients,
        weights,
        statistics.median(r["seconds"] for r in steps[5:] or steps),
    )


def compare(reference: Outcome, other: Outcome) -> Difference:
    failure = reference.failure or other.failure
    if failure:
        return _not_compared(other, failure)
    if len(reference.losses) != len(other.losses):
        return _not_compared(other, f"{len(other.losses)} steps, the reference has {len(reference.losses)}")
    loss = _largest(abs(a - b) for a, b in zip(reference.losses, other.losses, strict=True))
    norm = _largest(abs(a - b) / max(a, 1e-30) for a, b in zip(reference.norms, other.norms, strict=True))
    gradients = {
        name: _relative(tensor, other.gradients[name]) for name, tensor in reference.gradients.items()
    }
    weight = _largest(
        float((tensor - other.weights[name]).abs().max()) for name, tensor in reference.weights.items()
    )
    diverging = _first(gradients, GRADIENT_TOLERANCE, "gradient of step 1", backward=True)
    if diverging is None:
        relative = {
            name: _relative(tensor, other.weights[name]) for name, tensor in reference.weights.items()
        }
        diverging = _first(relative, WEIGHT_TOLERANCE, "final weight")
    agrees = loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE and diverging is None
    return Difference(
        other.name,
        other.processes,
        loss,
        norm,
        _largest(gradients.values()),
        weight,
        diverging,
        agrees,
        other.seconds,
    )


def table(reference: Outcome, rows: list[Difference]) -> str:
    """The comparison as aligned text, with what failed at the end."""
    if reference.failure:
        return f"{reference.name}: {reference.failure}"
    width = max(len(r.name) for r in rows)
    lines = [
        f"{len(reference.losses)} steps, loss {reference.losses[0]:.4f} -> {reference.losses[-1]:.4f} in one process; differences from it:",
        f"{'layout':<{width}}  {'ranks':>5}  {'loss':>8}  {'grad norm':>9}  {'gradients':>9}  {'weights':>8}  {'s/step':>7}  agrees",
    ]
    for r in rows:
        numbers = f"{r.loss:8.1e}  {r.norm:9.1e}  {r.gradient:9.1e}  {r.weight:8.1e}  {r.seconds:7.3f}"
        verdict = "yes" if r.agrees else f"NO   first: {r.diverging or 'the loss or the norm alone'}"
        lines.append(f"{r.name:<{width}}  {r.processes:>5}  {numbers}  {'FAILED' if r.failure else verdict}")
    lines.append(
        "loss: largest absolute difference of a step; grad norm: largest relative one; gradients: of the first step, largest"
    )
    lines.append(
        "relative L2 difference of a tensor; weights: after the last step, largest difference of an element"
    )
    lines += _compile_gains(reference, rows)
    lines += [f"\n{r.name}: {r.failure}" for r in rows if r.failure]
    return "\n".join(lines)


def _compile_gains(reference: Outcome, rows: list[Difference]) -> list[str]:
    """How many times faster a compiled layout steps than the same one eager."""
    eager = {reference.name: reference.seconds, **{r.name: r.seconds for r in rows}}
    gains = [
        f"{base} {eager[base] / r.seconds:.2f}x"
        for r in rows
        if (base := r.name.removesuffix(COMPILED)) != r.name
    ]
    return [f"\ncompiling makes a step faster by: {', '.join(gains)}"] if gains else []


def _failed(name: str, processes: int, why: str) -> Outcome:
    return Outcome(name, processes, [], [], {}, {}, failure=why.strip())


def _largest(values) -> float:
    """Like max, but not blind to NaN."""
    values = list(values)
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    scale = max(float(a.norm()), 1e-30)
    return float((a - b).norm()) / scale


def _not_compared(other: Outcome, why: str) -> Difference:
    return Difference(
        other.name, other.processes, math.nan, math.nan, math.nan, math.nan, None, False, failure=why
    )


def _first(differences: dict[str, float], tolerance: float, what: str, backward: bool = False) -> str | None:
    """The tensor nearest to the fault: a wrong gradient spreads to everything that backpropagation reaches after it."""
    for name in sorted(differences, key=_forward_order, reverse=backward):
        if not differences[name] <= tolerance:
            return f"{name} ({what} differs by {differences[name]:.1e})"
    return None


def _forward_order(name: str) -> tuple:
    """Where a parameter stands in the forward pass."""
    top = ("word", "position", "embedding", "layers", "final_norm", "head", "decoder_bias")
    inner = (
        "position",
        "token_type",
        "attention_norm",
        "attention",
        "mlp_norm",
        "mlp",
        "pooler",
        "sentence",
        "transform",
        "norm",
    )
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "layers" else 0
    below = parts[2 if parts[0] == "layers" else 1]
    return top.index(parts[0]), layer, inner.index(below) if below in inner else 0, name


def _last_error(log: Path) -> str:
    """The traceback of the rank that failed, or the end of the log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    start = text.rfind(" failed:\nTraceback")
    return text[start + 9 :][:3000] if start >= 0 else text[-1500:]
