"""Comparing two runs of one recipe: losses, gradient norms, gradients of the first step and final weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launch.checkpoints.checkpoint import newest
from launch.checkpoints.weights import load_tensors
from launch.runs.metrics import read_metrics

LOSS_TOLERANCE = 1e-4  # nats per token, at every step
NORM_TOLERANCE = 1e-4  # relative, at every step
GRADIENT_TOLERANCE = 1e-4  # L2 norm of the difference, relative to that of the tensor
WEIGHT_TOLERANCE = 1e-3  # the same, of the final weights: Adam amplifies rounding where gradients are small

REFUSED = "refused.txt"  # in a run directory: why the layout was not run

# Names of parameters, and of what is in a layer or a head, in forward order.
TOP = ("word", "position", "embedding", "layers", "final_norm", "head", "decoder_bias")
INNER = ("position", "token_type", "attention_norm", "attention", "mlp_norm", "mlp",
         "pooler", "sentence", "transform", "norm")  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    name: str
    processes: int
    losses: Sequence[float] = ()  # of every step
    norms: Sequence[float] = ()
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first step, by canonical name
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last one
    seconds: float = math.nan  # median per step, the first five left out
    failure: str | None = None  # why there is nothing to compare
    compiled_from: str | None = None  # the name of the same layout without compiled layers


@dataclass(frozen=True)
class Difference:
    """How far a run is from the reference.

    `diverging`: the first tensor beyond the tolerance, of gradients in backward, of weights in forward order.
    """

    run: Outcome
    loss: float = math.nan  # largest absolute difference over the steps
    norm: float = math.nan  # largest relative difference over the steps
    gradient: float = math.nan  # largest relative difference over the tensors, first step
    weight: float = math.nan  # largest absolute difference of an element of the final weights
    diverging: str | None = None
    agrees: bool = False
    failure: str | None = None  # why nothing was compared


def read_outcome(
    name: str, processes: int, directory: Path, log: Path, compiled_from: str | None = None
) -> Outcome:
    """The outcome of the run in `directory`, whose launch wrote `log`."""
    refused = directory / REFUSED
    if refused.exists():
        return Outcome(name, processes, failure=refused.read_text().strip())
    try:
        steps = list(read_metrics(directory / "metrics.jsonl").steps)
        gradients = load_tensors(directory, "gradients-stage-*.safetensors")
    except FileNotFoundError:
        steps = []
    last = newest(directory / "checkpoints")
    if last is None or not steps:
        return Outcome(name, processes, failure=f"did not finish: {_last_error(log)}".strip())
    losses = [math.nan if r.loss is None else r.loss for r in steps]
    norms = [math.nan if r.grad_norm is None else r.grad_norm for r in steps]
    seconds = statistics.median(r.seconds for r in steps[5:] or steps)
    weights = load_tensors(last.directory)
    return Outcome(name, processes, losses, norms, gradients, weights, seconds, compiled_from=compiled_from)


def compare(reference: Outcome, other: Outcome) -> Difference:
    failure = reference.failure or other.failure
    if failure is None and len(reference.losses) != len(other.losses):
        failure = f"{len(other.losses)} steps, the reference has {len(reference.losses)}"
    if failure:
        return Difference(other, failure=failure)
    loss = _largest(abs(a - b) for a, b in zip(reference.losses, other.losses, strict=True))
    norm = _largest(abs(a - b) / max(a, 1e-30) for a, b in zip(reference.norms, other.norms, strict=True))
    gradients = {name: _relative(t, other.gradients[name]) for name, t in reference.gradients.items()}
    weights = {name: _relative(t, other.weights[name]) for name, t in reference.weights.items()}
    weight = _largest(float((t - other.weights[name]).abs().max()) for name, t in reference.weights.items())
    diverging = _first(gradients, GRADIENT_TOLERANCE, "gradient of step 1", backward=True)
    diverging = diverging or _first(weights, WEIGHT_TOLERANCE, "final weight")
    agrees = loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE and diverging is None
    return Difference(other, loss, norm, _largest(gradients.values()), weight, diverging, agrees)


def table(reference: Outcome, rows: list[Difference]) -> str:
    """The comparison as aligned text, with what failed at the end."""
    if reference.failure:
        return f"{reference.name}: {reference.failure}"
    width = max(len(r.run.name) for r in rows)
    first, last = reference.losses[0], reference.losses[-1]
    lines = [
        f"{len(reference.losses)} steps, loss {first:.4f} -> {last:.4f} in one process; differences from it:",
        f"{'layout':<{width}}  ranks      loss  grad norm  gradients   weights   s/step  agrees",
    ]
    for r in rows:
        numbers = f"{r.loss:8.1e}  {r.norm:9.1e}  {r.gradient:9.1e}  {r.weight:8.1e}  {r.run.seconds:7.3f}"
        verdict = "yes" if r.agrees else f"NO   first: {r.diverging or 'the loss or the norm alone'}"
        verdict = "FAILED" if r.failure else verdict
        lines.append(f"{r.run.name:<{width}}  {r.run.processes:>5}  {numbers}  {verdict}")
    lines += [
        "loss: largest absolute difference of a step; grad norm: largest relative one; gradients: of the",
        "first step, largest relative L2 difference of a tensor; weights: after the last step, largest",
        "difference of an element",
        *_compile_gains([reference, *(r.run for r in rows)]),
        *(f"\n{r.run.name}: {r.failure}" for r in rows if r.failure),
    ]
    return "\n".join(lines)


def _compile_gains(runs: list[Outcome]) -> list[str]:
    """How many times faster a compiled layout steps than the same one eager."""
    seconds = {run.name: run.seconds for run in runs}
    pairs = [(run.compiled_from, run.seconds) for run in runs if run.compiled_from]
    gains = ", ".join(f"{eager} {seconds[eager] / compiled:.2f}x" for eager, compiled in pairs)
    return [f"\ncompiling makes a step faster by: {gains}"] if gains else []


def _largest(values: Iterable[float]) -> float:
    """Like max, but not blind to NaN."""
    return float(np.max([*values]))


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm()) / max(float(a.norm()), 1e-30)


def _first(differences: dict[str, float], tolerance: float, what: str, backward: bool = False) -> str | None:
    """The tensor nearest to the fault: a wrong gradient spreads to all that backpropagation reaches then."""
    for name in sorted(differences, key=_forward_order, reverse=backward):
        if not differences[name] <= tolerance:
            return f"{name} ({what} differs by {differences[name]:.1e})"
    return None


def _forward_order(name: str) -> tuple[Any, ...]:
    """Where a parameter stands in the forward pass."""
    top, *below = name.split(".")
    layer = int(below.pop(0)) if top == "layers" else 0
    return TOP.index(top), layer, INNER.index(below[0]) if below[0] in INNER else 0, name


def _last_error(log: Path) -> str:
    """The traceback of the rank that failed, or the end of the log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    start = text.rfind(" failed:\nTraceback")
    return text[start + 9 :][:3000] if start >= 0 else text[-1500:]
