"""Whether a layout computes what one process does, and the first tensor that it does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
ROUNDING = {"fp32": 2.0**-23, "fp16": 2.0**-11, "bf16": 2.0**-8}
PERTURBED = 3  # runs of the reference from weights that are rounded otherwise
TIMES = 10.0  # as much as the largest difference of these runs is rounding
NOTHING = 1e-6  # of the gradients' norm
LEAST = 10.0  # roundings of a tensor's norm, or of the loss, that always are
LOSSES = ("losses", "validations")  # in nats
FIGURES = (*LOSSES, "norms")  # which some programs do not tell
SQUARE = "exp_avg_sq"  # Adam's moment of squares of gradients
ORDER = {"gradient": 0, "weight": 2}  # of kinds in a step; moments come between them


@dataclass(frozen=True)
class Bounds:
    """Largest differences that rounding explains: L2 of tensors by `key`; relative ones of figures by step."""

    tensors: Mapping[str, float]
    figures: Mapping[str, Mapping[int, float]]


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
    """A layout next to the reference.

    Attributes:
        precision: that was asked for.
        losses: by step.
        loss: largest absolute difference of a step or a validation.
        norm: largest relative difference of a gradient norm.
        gradient: of the first step, largest relative L2 difference of a tensor.
        weight: after the last step, largest difference of an element.
        lost: tensors that no rank had.
        failure: why there is no comparison.
    """

    layout: Layout
    precision: str = "fp32"
    losses: Mapping[int, float] = field(default_factory=dict)
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
    figures = {}
    for name in FIGURES:
        figures[name] = dict.fromkeys(getattr(reference, name), least)
    expected = defaultdict[str, float](float)
    for run in perturbed:
        for fact in run.facts:
            of = key(fact.step, fact.kind, fact.name)
            expected[of] = fact.expected
            rounding = TIMES * fact.difference + least * fact.expected
            tensors[of] = max(tensors[of], rounding)
            if fact.kind == SQUARE:
                # its relative difference is twice that of the gradient, of which these few runs are a sample
                gradient = key(fact.step, "gradient", fact.name)
                norm = expected.get(gradient, 1.0) or 1.0
                relative = tensors.get(gradient, 0.0) / norm
                tensors[of] = max(
                    tensors[of], relative * (2 + relative) * fact.expected
                )
        for name, bounds in figures.items():
            for step, apart in _ratios(getattr(run, name), reference, name).items():
                bounds[step] = max(bounds[step], TIMES * abs(apart))
    return Bounds(dict(tensors), figures)


def _ratios(own: Mapping[int, float], reference: Found, name: str) -> dict[int, float]:
    """Return the relative differences of a figure by step."""
    ratios = {}
    for step, value in getattr(reference, name).items():
        if step in own:
            ratios[step] = (own[step] - value) / max(abs(value), 1e-30)
    return ratios


def mean(found: Sequence[Found], name: str) -> dict[int, float]:
    """Return a figure by step, the mean over the ranks that have one."""
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
    figures = {name: mean(found, name) for name in FIGURES}
    last = task.done + task.steps
    for name in LOSSES:
        for step in getattr(reference, name):
            if task.done < step <= last:
                figures[name].setdefault(step, np.nan)
    ratios = {name: _ratios(figures[name], reference, name) for name in FIGURES}
    wrong = dict[str, list[int]]()
    for name, own in ratios.items():
        most = bounds.figures[name]
        wrong[name] = [step for step in own if not abs(own[step]) <= most[step]]
    apart = list[float]()
    for name in LOSSES:
        of = getattr(reference, name)
        apart += [ratio * of[step] for step, ratio in ratios[name].items()]
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
        if task.done < step <= last and (kind == "weight" or not unread):
            lost.add(f"{kind} of {name} after step {step}")
    ends = [fact for fact in facts if (fact.step, fact.kind) == (last, "weight")]
    told = Figures(wrong["losses"], ratios["norms"])
    return Row(
        layout,
        task.precision,
        figures["losses"],
        loss=_largest(apart),
        norm=_largest(ratios["norms"].values()),
        gradient=_apart(facts, task.done + 1),
        weight=_largest(fact.largest for fact in ends),
        first=_first(layout, task, found, bounds, shares, told),
        loss_agrees=not wrong["losses"] and not wrong["validations"],
        norm_agrees=not wrong["norms"],
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
    """Return the first tensor beyond its bound: gradients, then moments and weights."""
    facts = defaultdict[tuple[int, str], dict[str, dict[int, Fact]]](dict)
    for rank, each in enumerate(found):
        for fact in each.facts:
            of_name = facts[fact.step, fact.kind].setdefault(fact.name, {})
            of_name[rank] = fact
    # as one process has them; ranks of a pipeline or of ZeRO have some alone
    every = {name: place for place, name in enumerate(bounds.tensors)}
    for step, kind in sorted(facts, key=lambda each: (each[0], ORDER.get(each[1], 1))):
        named = facts[step, kind]
        order = sorted(named, key=lambda name: every.get(key(step, kind, name), -1))
        tensors = {name: named[name] for name in order}
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
            name = names[0]
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


def _apart(facts: Iterable[Fact], step: int) -> float:
    """Return the largest relative L2 difference of a tensor's gradient.

    A tensor that has next to none beside all others is measured by theirs: it is nothing but rounding.
    """
    squares = defaultdict[str, Any](lambda: np.zeros(2))
    for fact in facts:
        if (fact.step, fact.kind) == (step, "gradient"):
            squares[fact.name] += fact.difference**2, fact.expected**2
    least = NOTHING**2 * sum(of for _, of in squares.values()) or 1.0
    return _largest(np.sqrt(apart / max(of, least)) for apart, of in squares.values())
