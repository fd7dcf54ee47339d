"""Whether a layout computes what one process does, and the first tensor that it does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.experiments.proving.layout import Layout
from launch.experiments.proving.mistakes import (
    Figures,
    Mistake,
    Shares,
    of_gradient,
    of_update,
)
from launch.experiments.proving.pieces import Pieces
from launch.experiments.proving.task import Fact, Found, Task, found_by, key, read_found

# relative rounding of a number
ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-8}
PERTURBED = 3  # runs of the reference from weights that are rounded otherwise
TIMES = 10.0  # as much as the largest difference of these runs is rounding
LEAST = 10.0  # roundings of a tensor's norm, or of the loss, that always are
ORDER = {"gradient": 0, "weight": 2}  # of kinds in a step; moments come between them


@dataclass(frozen=True)
class Bounds:
    """Largest differences that rounding explains: L2 of tensors, losses in nats, norms relative."""

    tensors: Mapping[str, float]
    losses: Mapping[int, float]
    norms: Mapping[int, float]


@dataclass(frozen=True)
class First:
    """The first tensor beyond its bound.

    Attributes:
        ranks: that have it so.
        apart: relative L2 difference, and the bound of it.
        alike: of so many tensors of this kind and step, so many differ.
        mistake: what it looks like.
    """

    step: int
    kind: str
    name: str
    ranks: Sequence[int]
    apart: float
    bound: float
    alike: tuple[int, int]
    mistake: Mistake


@dataclass(frozen=True)
class Row:
    """A layout next to the reference: largest differences, relative but for the loss.

    Attributes:
        lost: tensors that no rank had.
        failure: why there is no comparison.
    """

    layout: Layout
    loss: float = np.nan
    norm: float = np.nan
    gradient: float = np.nan
    weight: float = np.nan
    first: First | None = None
    loss_agrees: bool = False
    norm_agrees: bool = False
    lost: Sequence[str] = ()
    unread: Sequence[str] = ()
    unasked: Sequence[str] = ()
    failure: str = ""
    notes: Sequence[str] = ()

    @property
    def agrees(self) -> bool:
        wrong = self.failure or self.first or self.lost
        return not wrong and self.loss_agrees and self.norm_agrees


def bounds_of(reference: Found, perturbed: Iterable[Found], precision: str) -> Bounds:
    """Return what rounding does to the reference: `TIMES` the differences of perturbed runs from it."""
    least = LEAST * ROUNDING[precision]
    tensors = defaultdict[str, float](float)
    losses = {step: least * abs(loss) for step, loss in reference.losses.items()}
    norms = dict.fromkeys(reference.norms, least)
    for run in perturbed:
        for fact in run.facts:
            of = key(fact.step, fact.kind, fact.name)
            rounding = TIMES * fact.difference + least * fact.expected
            tensors[of] = max(tensors[of], rounding)
        for step, loss in reference.losses.items():
            apart = TIMES * abs(run.losses[step] - loss)
            losses[step] = max(losses[step], apart)
        for step, norm in reference.norms.items():
            apart = TIMES * abs(run.norms[step] / norm - 1)
            norms[step] = max(norms[step], apart)
    return Bounds(dict(tensors), losses, norms)


def mean(found: Sequence[Found], name: str) -> dict[int, float]:
    """Return losses or norms by step, the mean over the ranks that have one."""
    of = defaultdict[int, list[float]](list)
    for each in found:
        for step, value in getattr(each, name).items():
            of[step].append(value)
    return {step: float(np.mean(values)) for step, values in of.items()}


def row_of(
    layout: Layout, task: Task, reference: Found, bounds: Bounds, shares: Shares
) -> Row:
    """Compare a layout's training with the reference."""
    found = [read_found(found_by(task.out, rank)) for rank in range(layout.ranks)]
    losses = mean(found, "losses")
    norms = mean(found, "norms")
    apart, ratios = dict[int, float](), dict[int, float]()
    for step in range(task.done + 1, task.done + task.steps + 1):
        if step in reference.losses:
            apart[step] = losses.get(step, np.nan) - reference.losses[step]
        if step in reference.norms.keys() & norms.keys():
            ratios[step] = norms[step] / reference.norms[step] - 1
    facts = list[Fact]()
    misfits, unread, unknown = set[str](), set[str](), set[str]()
    for each in found:
        facts += each.facts
        misfits.update(each.misfits.values())
        unread.update(each.unread)
        unknown.update(each.unknown)
    seen = {key(fact.step, fact.kind, fact.name) for fact in facts}
    lost = set[str]()
    for of in bounds.tensors.keys() - seen:
        number, kind, name = of.split("/", 2)
        step = int(number)
        # moments that an optimizer does not show are `unread`, and gradients are told from them
        if step > task.done and (kind == "weight" or not unread):
            lost.add(f"{kind} of {name} after step {step}")
    wrong = [step for step in apart if not abs(apart[step]) <= bounds.losses[step]]
    figures = Figures(wrong, ratios)
    return Row(
        layout,
        loss=_largest(apart.values()),
        norm=_largest(ratios.values()),
        gradient=_apart(facts, "gradient"),
        weight=_apart(facts, "weight"),
        first=_first(layout, task, found, bounds, shares, figures),
        loss_agrees=not wrong,
        norm_agrees=all(abs(ratios[step]) <= bounds.norms[step] for step in ratios),
        lost=sorted(lost),
        unread=sorted(unread),
        unasked=found[0].unasked,
        failure="\n".join(sorted(misfits)),
        notes=sorted(unknown),
    )


def _first(
    layout: Layout,
    task: Task,
    found: Sequence[Found],
    bounds: Bounds,
    shares: Shares,
    figures: Figures,
) -> First | None:
    """Return the first tensor beyond its bound: gradients backward, then moments and weights forward."""
    facts = defaultdict[tuple[int, str], dict[str, dict[int, Fact]]](dict)
    for rank, each in enumerate(found):
        for fact in each.facts:
            of_name = facts[fact.step, fact.kind].setdefault(fact.name, {})
            of_name[rank] = fact
    for step, kind in sorted(facts, key=lambda each: (each[0], ORDER.get(each[1], 1))):
        tensors = facts[step, kind]
        beyond, others = {}, []
        for name, by_rank in tensors.items():
            bound = bounds.tensors.get(key(step, kind, name), np.inf)
            ranks = [
                rank for rank, fact in by_rank.items() if not fact.difference <= bound
            ]
            if ranks:
                beyond[name] = ranks
            if kind == "gradient" and any(
                by_rank[rank].across > bound for rank in ranks
            ):
                others.append(name)
        if beyond:
            # clipping scales all others, where one is wrong
            names = others if others and len(beyond) == len(tensors) else [*beyond]
            name = names[-1 if kind == "gradient" else 0]
            ranks = beyond[name]
            worst = max((tensors[name][rank] for rank in ranks), key=_relative)
            pieces = Pieces(
                Path(task.out), Path(task.reference), step, kind, name, [*tensors[name]]
            )
            if kind == "gradient":
                mistake = of_gradient(pieces, layout, shares, figures)
            else:
                mistake = of_update(pieces, step == task.done)
            bound = bounds.tensors[key(step, kind, name)] / max(worst.expected, 1e-30)
            counts = len(beyond), len(tensors)
            return First(
                step, kind, name, ranks, _relative(worst), bound, counts, mistake
            )
    return None


def _relative(fact: Fact) -> float:
    return fact.difference / max(fact.expected, 1e-30)


def _largest(values: Iterable[float]) -> float:
    """Return the largest magnitude; NaN if one is NaN, or there is none."""
    return float(np.max(np.abs([*values] or [np.nan])))


def _apart(facts: Iterable[Fact], kind: str) -> float:
    """Return the largest relative L2 difference of a step, over all tensors of a kind."""
    squares = defaultdict[int, Any](lambda: np.zeros(2))
    for fact in facts:
        if fact.kind == kind:
            squares[fact.step] += fact.difference**2, fact.expected**2
    return _largest(np.sqrt(apart / of) for apart, of in squares.values())
