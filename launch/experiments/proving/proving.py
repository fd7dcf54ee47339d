"""A proof from the first run in one process to the table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from launch.machine.compiled_ops import Say
from recipes.problems import ProblemsError, counted


class Reference:
    """The runs in one process, to which every layout is compared. Raises ProblemsError.

    `numbers`: of equal shares of the batch on which one step is made each; none: batches are the adapter's own.

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
        for number in sorted({2, *numbers} if numbers else ()):
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
        every = [task, again, *perturbed]
        if numbers:
            every += [other_seed, *itertools.chain.from_iterable(shares.values())]
        for failure in launch(every, 1, rest=False).values():
            raise ProblemsError.of(
                "ADAPTER", failure, "it trains in one process first", "mend it there"
            )
        self.found = _of(task)
        _check_repeat(self.found, _of(again))
        self.bounds = bounds_of(self.found, map(_of, perturbed), task.precision)
        self.shares = Shares()
        if numbers:
            _check_batch(self.found, [_of(each) for each in shares[2]])
            first = self.found.losses.get(1)
            runs = {}
            for number, tasks in shares.items():
                runs[number] = {Path(each.out): _clipped(each) for each in tasks}
            random = _of(other_seed).losses.get(1) != first
            self.shares = Shares(runs, random)

    def compared(self, task: Task) -> Task:
        """Return a task that is compared with this."""
        return replace(
            task,
            initial=str(Path(self.task.out) / INITIAL),
            reference=self.task.out,
            bounds=self.bounds.tensors,
        )

    def rows(self, layouts: Sequence[Layout], tasks: Sequence[Task]) -> list[Row]:
        """Train the tasks of layouts that have as many ranks, in one launch, and compare."""
        failures = launch(tasks, layouts[0].ranks)
        rows = []
        for layout, task in zip(layouts, tasks, strict=True):
            failure = failures.get(task.out)
            if failure:
                rows.append(Row(layout, failure=failure))
            else:
                row = row_of(layout, task, self.found, self.bounds, self.shares)
                rows.append(row)
        return rows


@dataclass(frozen=True)
class Proven:
    """The reference, and every layout next to it."""

    reference: Reference
    rows: Sequence[Row]

    @property
    def agrees(self) -> bool:
        return all(row.agrees for row in self.rows)

    def told(self, width: int | None = None) -> str:
        """Return the table, and what is wrong."""
        return report(self.reference.found, self.reference.shares, self.rows, width)


def prove(
    task: Task,
    layouts: Sequence[str],
    resume: str = "",
    together: bool = False,
    say: Say = terminal.say,
) -> Proven:
    """Train in one process and under every layout. Raises ProblemsError.

    Args:
        task: of one process, with the number of steps, the accumulation of all layouts and a new directory.
        resume: layout of a resume after the first step, or `SAME`; "": none.
        together: layouts of as many ranks share a launch.
    """
    chosen = [layout_of(name, task.accumulation) for name in layouts]
    say(f"one process: {counted(task.steps, 'step')}, again, and rounded otherwise")
    single = replace(task, out=f"{task.out}/one-process", accumulation=1)
    reference = Reference(single, {layout.shares for layout in chosen})
    groups = dict[object, list[Layout]]()
    for layout in chosen:
        launched = layout.ranks if together else layout.name
        groups.setdefault(launched, []).append(layout)
    rows = []
    for group in groups.values():
        names = "; ".join(layout.name for layout in group)
        say(f"{names}: {counted(group[0].ranks, 'rank')}")
        rows += _rows(reference, group, task, resume)
    return Proven(reference, rows)


def _rows(
    reference: Reference, layouts: Sequence[Layout], task: Task, resume: str
) -> list[Row]:
    """Train under layouts of as many ranks, and compare."""
    tasks = []
    for layout in layouts:
        under = replace(task, layout=layout.name, out=f"{task.out}/{layout.name}")
        tasks.append(reference.compared(under))
    if not resume:
        return reference.rows(layouts, tasks)
    first = []
    second = []
    resumed = []
    for layout, of in zip(layouts, tasks, strict=True):
        again = layout_of(layout.name if resume == SAME else resume, task.accumulation)
        saved = f"{of.out}-saved"
        first.append(replace(of, out=f"{of.out}-first", steps=1, checkpoint=saved))
        steps = of.steps - 1
        name = again.name
        second.append(replace(of, layout=name, done=1, steps=steps, resumed=saved))
        resumed.append(Layout(f"{layout.name}, resumed as {name}", again.words))
    saving = reference.rows(layouts, first)
    for place in reversed(range(len(saving))):
        row = saving[place]
        if not row.failure and not any(Path(first[place].checkpoint).glob("*")):
            why = "nothing was saved to proof.checkpoint, which there is to resume"
            saving[place] = row = Row(row.layout, failure=why)
        if row.failure:
            del second[place], resumed[place]
    if second:
        saving += reference.rows(resumed, second)
    return saving


def _clipped(task: Task) -> float:
    """Return how many times larger the first step's gradients were before clipping; 1.0: not known."""
    kept = load_file(tensors_of(task.out, 1))
    gradients = [each for name, each in kept.items() if name.startswith("gradient/")]
    norm = _of(task).norms.get(1)
    if not norm or not gradients:
        return 1.0
    squares = [float(each.double().square().sum()) for each in gradients]
    return norm / math.sqrt(sum(squares))


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
