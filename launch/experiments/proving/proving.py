"""A proof from the first run in one process to the table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from launch.console import terminal
from launch.experiments.proving.layout import SAME, Layout, layout_of
from launch.experiments.proving.mistakes import Shares
from launch.experiments.proving.runs import launch
from launch.experiments.proving.task import (
    INITIAL,
    Found,
    Task,
    found_by,
    read_found,
    tensors_of,
)
from launch.experiments.proving.text import report
from launch.experiments.proving.verdict import (
    PERTURBED,
    ROUNDING,
    Row,
    bounds_of,
    row_of,
)
from recipes.problems import ProblemsError, counted


class Reference:
    """The runs in one process, to which every layout is compared. Raises ProblemsError.

    Attributes:
        task: of the run whose tensors are kept.
        found: by that run, losses and norms.
        bounds: what rounding explains.
        shares: runs on a share of the batch alone.
    """

    def __init__(self, task: Task, numbers: set[int]) -> None:
        self.task = task
        out = Path(task.out)
        like = replace(task, initial=str(out / INITIAL), reference=task.out)
        again = replace(like, out=f"{task.out}-again")
        seed = task.seed + 1
        other_seed = replace(like, out=f"{task.out}-other-seed", seed=seed, steps=1)
        perturbed = []
        for number in range(1, PERTURBED + 1):
            rounded = replace(
                like,
                out=f"{task.out}-rounded-{number}",
                rounding=ROUNDING[task.precision],
                seed=task.seed,
                noise=number,
            )
            perturbed.append(rounded)
        shares = dict[int, list[Task]]()
        for number in sorted(numbers | {2}):
            shares[number] = [
                replace(
                    like,
                    out=f"{task.out}-share-{index}-of-{number}",
                    reference="",
                    steps=1,
                    share=(index, number),
                )
                for index in range(number)
            ]
        every = [task, again, *perturbed, other_seed]
        every += [each for tasks in shares.values() for each in tasks]
        failure = launch(every, 1)
        if failure:
            raise ProblemsError.of(
                "ADAPTER", failure, "it trains in one process first", "mend it there"
            )
        self.found = _of(task)
        _check_repeat(self.found, _of(again))
        _check_batch(self.found, [_of(each) for each in shares[2]])
        self.bounds = bounds_of(self.found, map(_of, perturbed), task.precision)
        first = self.found.losses.get(1)
        runs = {}
        for number, tasks in shares.items():
            runs[number] = {Path(each.out): _clipped(each) for each in tasks}
        self.shares = Shares(runs, random=_of(other_seed).losses.get(1) != first)


def prove(
    adapter: Path, layouts: Sequence[Layout], args: argparse.Namespace, out: Path
) -> int:
    """Train in one process and under every layout, print the table, and return the exit code."""
    task = Task(
        str(adapter.resolve()),
        args.reference,
        str(out / "one-process"),
        args.steps,
        precision=args.precision,
        timeout=args.timeout,
    )
    terminal.say(
        f"one process: {counted(args.steps, 'step')}, again, and rounded otherwise"
    )
    reference = Reference(task, {layout.shares for layout in layouts})
    rows = []
    for layout in layouts:
        terminal.say(f"{layout.name}: {counted(layout.ranks, 'rank')}")
        rows.append(_prove(reference, layout, args, out / layout.name))
    print("\n" + report(reference.found, reference.shares, rows, terminal.columns()))
    return 0 if all(row.agrees for row in rows) else 1


def _prove(
    reference: Reference, layout: Layout, args: argparse.Namespace, out: Path
) -> Row:
    """Train under one layout, and compare."""
    task = replace(
        reference.task,
        layout=layout.name,
        accumulation=args.accumulation,
        out=str(out),
        initial=str(Path(reference.task.out) / INITIAL),
        reference=reference.task.out,
        bounds=reference.bounds.tensors,
    )
    failure = ""
    if args.resume is not None:
        saved = out / "checkpoint"
        first = replace(task, out=f"{out}-first", steps=1, checkpoint=str(saved))
        failure = launch([first], layout.ranks)
        if args.resume != SAME:
            layout = layout_of(args.resume, args.accumulation)
        task = replace(
            task, layout=layout.name, done=1, steps=args.steps - 1, resumed=str(saved)
        )
    failure = failure or launch([task], layout.ranks)
    if failure:
        return Row(layout, failure=failure)
    return row_of(layout, task, reference.found, reference.bounds, reference.shares)


def _clipped(task: Task) -> float:
    """Return how many times larger the first step's gradients were before clipping; 1.0: not known."""
    kept = load_file(tensors_of(task.out, 1))
    gradients = [each for name, each in kept.items() if name.startswith("gradient/")]
    norm = _of(task).norms.get(1)
    if not norm or not gradients:
        return 1.0
    squares = sum(float(each.double().square().sum()) for each in gradients)
    return float(norm / squares**0.5)


def _of(task: Task) -> Found:
    return read_found(found_by(task.out, 0))


def _check_repeat(found: Found, again: Found) -> None:
    """Refuse an adapter that is not deterministic. Raises ProblemsError."""
    differing = [fact for fact in again.facts if fact.difference > 0]
    if not differing and found.losses == again.losses:
        return
    first = differing[0] if differing else None
    where = (
        f"{first.kind} of {first.name} at step {first.step}" if first else "the loss"
    )
    raise ProblemsError.of(
        "ADAPTER",
        f"a second run in one process has another {where}",
        "one process computes the same twice, from the same weights, batches and seed",
        "draw nothing from clocks, own generators or the order of threads; give proof.load() the model "
        "before anything wraps it",
    )


def _check_batch(found: Found, halves: Sequence[Found]) -> None:
    """Refuse an adapter that ignores the batch. Raises ProblemsError."""
    losses = {half.losses.get(1) for half in halves}
    if losses == {found.losses.get(1)} and found.losses:
        raise ProblemsError.of(
            "ADAPTER",
            "half of the batch gives the loss of the whole",
            "a step is made on the batch that proof.batches() gives",
            "train on that",
        )
