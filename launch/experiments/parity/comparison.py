"""Compare two runs of one recipe: losses, gradient norms, first gradients and final weights."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from launch.checkpoints.run_checkpoints import newest
from launch.console import text_table
from launch.console.terminal import wrapped
from launch.experiments.parity.layout_cases import LayoutCase
from launch.records.directory import RunDirectory
from launch.records.metrics import read_metrics
from recipes.problems import Problem, counted


class Tolerances(NamedTuple):
    """Largest differences from the reference of a layout that agrees."""

    loss: float = 1e-4  # nats, at every step
    norm: float = 1e-4  # relative, at every step
    gradient: float = 1e-4  # L2 norm of the difference, relative to that of the tensor
    # the same, of the final weights: Adam amplifies rounding where gradients are small
    weight: float = 1e-3


# By the precision of weights and states. In bf16 twice what `compare_layouts.py --tiny --only "pure bf16 dp2"
# "pure bf16 tp2"` measured: with `--recipe bert/sotu` 4.8e-3, 1.0e-2, 0.14 and 0.11, with GPT-2 half of it.
TOLERANCES = {"fp32": Tolerances(), "bf16": Tolerances(1e-2, 2e-2, 0.28, 0.22)}

MOST_SHOWN = 2000  # characters of a failure, from its end
ENDED = re.compile(
    r"^.*failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)", re.MULTILINE
)
HEADINGS = (
    "layout",
    "ranks",
    "loss",
    "grad norm",
    "gradients",
    "weights",
    "s/step",
    "agrees",
)

# Names of parameters, and of modules in a layer or head, in forward order.
TOP = ("word", "position", "embedding", "layers", "final_norm", "head", "decoder_bias")
INNER = (
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


@dataclass(frozen=True)
class RunOutcome:
    """Losses, norms, gradients and weights of one run, or its failure."""

    case: LayoutCase
    losses: Sequence[float] = ()  # of every step
    norms: Sequence[float] = ()
    # of the first step, by canonical name
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # after the last one
    seconds: float = math.nan  # median per step without the first five
    # losses on held-out text, before and after the steps
    validations: Sequence[float] = ()
    failure: str | None = None  # reason for a missing result

    @property
    def name(self) -> str:
        return self.case.name


@dataclass(frozen=True)
class Difference:
    """The differences of a run, kept without its tensors, from the reference.

    `diverging`: the first tensor beyond the tolerance, gradients in backward order, weights in forward order.
    """

    run: RunOutcome
    # largest absolute difference over the steps and the validations
    loss: float = math.nan
    norm: float = math.nan  # largest relative difference over the steps
    # largest relative difference over the tensors, first step
    gradient: float = math.nan
    # largest absolute difference of an element of the final weights
    weight: float = math.nan
    diverging: str | None = None
    agrees: bool = False
    failure: str | None = None  # reason for a missing comparison


def read_outcome(case: LayoutCase, directory: Path, log: Path) -> RunOutcome:
    """Read the outcome of the run in `directory`. `log`: output of its launch."""
    # These load DeepSpeed, too slow for --help and refusals.
    from launch.checkpoints.stored import load_weights
    from launch.experiments.parity import gradients

    run = RunDirectory(directory)
    last = newest(run.checkpoints)
    if last is None or not run.result_json.exists():
        return RunOutcome(
            case, failure=f"did not finish: {_cause(directory, log)}".strip()
        )
    records = read_metrics(run.metrics_jsonl)
    return RunOutcome(
        case,
        losses=[_number(record.loss) for record in records.steps],
        validations=[_number(record.loss) for record in records.validations],
        norms=[_number(record.grad_norm) for record in records.steps],
        gradients=load_weights(directory / gradients.DIRECTORY, gradients.KIND),
        weights=load_weights(last.directory),
        seconds=statistics.median(
            record.seconds for record in records.steps[5:] or records.steps
        ),
    )


def _number(recorded: float | None) -> float:
    return math.nan if recorded is None else recorded


def compare(reference: RunOutcome, other: RunOutcome) -> Difference:
    failure = reference.failure or other.failure
    if failure is None and len(reference.losses) != len(other.losses):
        failure = f"{counted(len(other.losses), 'step')}, the reference has {len(reference.losses)}"
    run = replace(other, gradients={}, weights={})
    if failure:
        return Difference(run, failure=failure)
    losses, others = ([*run.losses, *run.validations] for run in (reference, other))
    loss = _largest(abs(a - b) for a, b in zip(losses, others, strict=True))
    norm = _largest(
        abs(a - b) / max(a, 1e-30)
        for a, b in zip(reference.norms, other.norms, strict=True)
    )
    gradients = {
        name: _relative(t, other.gradients[name])
        for name, t in reference.gradients.items()
    }
    weights = {
        name: _relative(t, other.weights[name]) for name, t in reference.weights.items()
    }
    weight = _largest(
        float((t - other.weights[name]).abs().max())
        for name, t in reference.weights.items()
    )
    most = TOLERANCES[other.case.states]
    diverging = _first(gradients, most.gradient, "gradient of step 1", backward=True)
    diverging = diverging or _first(weights, most.weight, "final weight")
    agrees = loss <= most.loss and norm <= most.norm and diverging is None
    return Difference(
        run, loss, norm, _largest(gradients.values()), weight, diverging, agrees
    )


def table(
    reference: RunOutcome,
    rows: Sequence[Difference],
    left_out: Mapping[str, Sequence[Problem]],
    width: int | None = None,
) -> str:
    """Return the comparison as aligned text of `width` columns, followed by failures and layouts not run."""
    if reference.failure:
        return f"{reference.name}: {reference.failure}"
    first = reference.losses[0]
    last = reference.losses[-1]
    cells = [(row.run.name, row.run.case.processes, *_numbers(row)) for row in rows]
    cells += [(name, *"------", "not run") for name in left_out]
    said = [
        "loss: largest absolute difference of a step or a validation; grad norm: largest relative one",
        "gradients: of the first step, largest relative L2 difference of a tensor",
        "weights: after the last step, largest difference of an element",
        *_compile_gains([reference, *(row.run for row in rows)]),
        *(f"\n{row.run.name}: {row.failure}" for row in rows if row.failure),
        *(f"\n{reason}" for reason in reasons(left_out)),
    ]
    lines = [
        f"{counted(len(reference.losses), 'step')}, loss {first:.4f} -> {last:.4f} in one process; "
        "differences from it:",
        text_table.table(cells, HEADINGS, "lrrrrrrl", width),
        *(wrapped(line, width) for line in said),
    ]
    return "\n".join(lines)


def _numbers(row: Difference) -> tuple[str, ...]:
    """Return the differences, the seconds per step and the verdict."""
    if row.failure:
        return *"-----", "FAILED"
    differences = (row.loss, row.norm, row.gradient, row.weight)
    verdict = (
        "yes"
        if row.agrees
        else f"NO, first: {row.diverging or 'the loss or the norm alone'}"
    )
    return *(f"{each:.1e}" for each in differences), f"{row.run.seconds:.3f}", verdict


def reasons(left_out: Mapping[str, Sequence[Problem]]) -> list[str]:
    """Return one line per layout with the reasons for not running it."""
    return [
        f"{name} is not run: {'; '.join(map(str, problems))}"
        for name, problems in left_out.items()
    ]


def _compile_gains(runs: list[RunOutcome]) -> list[str]:
    """Return a line with the speed of compiled layouts relative to eager ones."""
    seconds = {run.name: run.seconds for run in runs}
    pairs = [
        (eager, seconds[eager] / run.seconds)
        for run in runs
        if (eager := run.case.compiled_from)
    ]
    gains = ", ".join(f"{eager} {times:.2f}x" for eager, times in pairs)
    return [f"\ncompiling makes a step faster by: {gains}"] if gains else []


def _largest(values: Iterable[float]) -> float:
    """Return the maximum, or NaN if any value is NaN."""
    return float(np.max([*values]))


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm()) / max(float(a.norm()), 1e-30)


def _first(
    differences: dict[str, float], tolerance: float, what: str, backward: bool = False
) -> str | None:
    """Describe the first tensor beyond the tolerance; later ones inherit the error of a wrong gradient."""
    for name in sorted(differences, key=_forward_order, reverse=backward):
        if not differences[name] <= tolerance:
            return f"{name} ({what} differs by {differences[name]:.1e})"
    return None


def _forward_order(name: str) -> tuple[Any, ...]:
    """Return a sort key: the parameter's position in the forward pass; none for names of transformers."""
    top, *below = name.split(".")
    if top not in TOP:
        return ()
    layer = int(below.pop(0)) if top == "layers" else 0
    return (
        TOP.index(top),
        layer,
        INNER.index(below[0]) if below[0] in INNER else 0,
        name,
    )


def _cause(directory: Path, log: Path) -> str:
    """Return the traceback of a failed rank, from the run or its parent folder; else the end of the log."""
    pattern = "error-rank-*.txt"
    for kept in (
        *sorted(directory.glob(pattern)),
        *sorted(directory.parent.glob(pattern)),
    ):
        return kept.read_text(errors="replace").strip()[-MOST_SHOWN:]
    text = log.read_text(errors="replace") if log.exists() else ""
    ended = ENDED.search(text)  # torchrun's own report follows; it adds nothing
    killed = (
        f"\nrank {ended['rank']} ended with exit code {ended['code']}" if ended else ""
    )
    return text[: ended.start() if ended else None].strip()[-MOST_SHOWN:] + killed
