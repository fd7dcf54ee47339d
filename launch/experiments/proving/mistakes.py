"""What kind of mistake a differing tensor looks like.

A gradient is taken apart into those of equal shares of the batch, of which each was trained on alone: the
numbers by which these are summed tell a share that is missing, counted twice, or averaged otherwise. An update
of a weight is taken apart into the reference's and the weight itself: learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from launch.experiments.proving.layout import ACCUMULATION, DEGREES, Layout
from launch.experiments.proving.pieces import Pieces, read
from launch.experiments.proving.task import tensors_of

EXPLAINED = 1e-3  # relative residual of what is taken apart
CLOSE = 0.01  # relative difference of factors


@dataclass(frozen=True)
class Mistake:
    """A kind of mistake.

    Attributes:
        kind: one of `SENTENCES`.
        factor: by which the tensor, or the update, is too large.
        degrees: of the layout that are equal to the factor, or to its inverse.
        counts: how often each share of the batch counts, where once is right.
        ranks: of which it is told.
    """

    kind: str
    factor: float = 1.0
    degrees: Sequence[str] = ()
    counts: Sequence[float] = ()
    ranks: Sequence[int] = ()


@dataclass(frozen=True)
class Shares:
    """Trainings on one share of the batch each.

    Attributes:
        runs: by the number of shares; of each how many times larger its gradients were before clipping.
        random: another seed gives another loss.
    """

    runs: Mapping[int, Mapping[Path, float]] = field(default_factory=dict)
    random: bool = False


@dataclass(frozen=True)
class Figures:
    """What a program tells of its steps, next to one process.

    Attributes:
        losses: steps whose losses differ beyond rounding.
        norms: relative differences of gradient norms, by step.
    """

    losses: Sequence[int] = ()
    norms: Mapping[int, float] = field(default_factory=dict)


def of_gradient(
    pieces: Pieces, layout: Layout, shares: Shares, figures: Figures
) -> Mistake:
    """Tell the kind of a differing gradient."""
    drifted = of_replicas(pieces)
    if drifted and drifted.kind != "replica":
        return drifted
    unknown = "forward" if pieces.step in figures.losses else "other"
    if shares.random:
        unknown = "random"
    if drifted:
        return drifted if unknown == "other" else Mistake(unknown)
    own = pieces.assembled
    (factor,), apart = _fit(own, [pieces.whole])
    if apart < EXPLAINED:
        # that of the norm is the one before clipping
        norm = 1 + figures.norms.get(pieces.step, 0.0)
        if abs(factor * norm - 1) < CLOSE:
            return Mistake("norm", factor, _degrees(factor, layout))
        if abs(norm - 1) > CLOSE:
            factor = norm
        return Mistake("factor", factor, _degrees(factor, layout))
    runs = shares.runs.get(layout.shares, {})
    parts = [read(tensors_of(run, 1), pieces.name) for run in runs]
    if 0 < len(parts) < len(own):
        right, whole_apart = _fit(pieces.whole, parts)
        counted, apart = _fit(own, parts)
        if max(apart, whole_apart) < EXPLAINED:
            counts = [a / b for a, b in zip(counted, right, strict=True)]
            kind = _of_counts(counts, counted, [*runs.values()])
            return Mistake(kind, counts=counts)
    factors = _factors(pieces)
    wrong = [rank for rank, factor in factors.items() if abs(factor - 1) > CLOSE]
    if pieces.equal:
        wrong = [*pieces.own]
    return Mistake("piece", ranks=wrong) if wrong else Mistake(unknown)


def of_update(pieces: Pieces, initial: bool) -> Mistake:
    """Tell the kind of a weight or moment that differs though its gradient does not."""
    if initial and pieces.name.startswith("weight"):
        return Mistake("initial", ranks=[*pieces.own])
    drifted = of_replicas(pieces)
    if pieces.before is None or (drifted and drifted.kind == "not summed"):
        return drifted or Mistake("history")
    own = pieces.assembled - pieces.before
    update = pieces.whole - pieces.before
    if not update.any():  # a buffer
        return drifted or Mistake("update")
    if own.norm() < EXPLAINED * update.norm():
        return Mistake("still")
    (rate, decay), apart = _fit(own, [update, pieces.before])
    if apart > 10 * EXPLAINED:
        return drifted or Mistake("update")
    if abs(rate - 1) > CLOSE:
        return Mistake("rate", rate)
    return Mistake("decay", decay)


def of_replicas(pieces: Pieces) -> Mistake | None:
    """Tell how ranks differ that have the same elements, and not the same numbers."""
    for ranks in pieces.replicas.values():
        owns = [pieces.own[rank] for rank in ranks]
        right = pieces.whole[pieces.elements[ranks[0]]]
        spread = max(float((each - owns[0]).norm()) for each in owns)
        apart = float((owns[0] - right).norm())
        same = [rank for rank in pieces.equal if len(owns[0]) == len(pieces.whole)]
        if spread < CLOSE * apart and not same:
            continue
        scaled = _factors(pieces)
        if {*ranks} <= {*scaled} and pieces.name.startswith("gradient"):
            counts = [scaled[rank] for rank in ranks]
            return Mistake("scales", counts=counts, ranks=ranks)
        if len(ranks) < len(right) and not same:
            # each rank may have clipped its own
            counts, residual = _fit(right, owns)
            if residual < EXPLAINED and min(map(abs, counts)) > CLOSE:
                return Mistake("not summed", counts=counts, ranks=ranks)
        return Mistake("replica", ranks=ranks)
    return None


def _factors(pieces: Pieces) -> dict[int, float]:
    """Return by how much the numbers of a rank are too large, of ranks of which that is all."""
    factors = {}
    for rank, own in pieces.own.items():
        (factor,), apart = _fit(own, [pieces.whole[pieces.elements[rank]]])
        if apart < EXPLAINED:
            factors[rank] = factor
    return factors


def _fit(of: Tensor, parts: Sequence[Tensor]) -> tuple[list[float], float]:
    """Return the factors of the parts whose sum is nearest, and the relative rest."""
    matrix = torch.stack([*parts], 1)
    scale = matrix.norm(dim=0).clamp_min(1e-30)
    factors = torch.linalg.lstsq(matrix / scale, of[:, None]).solution[:, 0] / scale
    rest = float((of - matrix @ factors).norm() / of.norm().clamp_min(1e-30))
    return factors.tolist(), rest


def _degrees(factor: float, layout: Layout) -> list[str]:
    equal = []
    for name in (*DEGREES, ACCUMULATION):
        size = layout[name]
        ratios = (factor * size, factor / size)
        if size > 1 and min(abs(each - 1) for each in ratios) < CLOSE:
            equal.append(name)
    return equal


def _of_counts(
    counts: Sequence[float], factors: Sequence[float], clipped: Sequence[float]
) -> str:
    """Tell the kind by how often the shares count, and by their factors in the sum.

    `clipped`: how many times a share's gradients were larger before clipping.
    """
    largest = max(map(abs, counts))
    if min(map(abs, counts)) < CLOSE * largest:
        return "missing"
    if _alike(factors) and max(clipped) > 1 + CLOSE:
        return "clipped"
    unclipped = [a / b for a, b in zip(factors, clipped, strict=True)]
    return "means" if _alike(unclipped) else "counts"


def _alike(numbers: Sequence[float]) -> bool:
    return max(numbers) - min(numbers) < CLOSE * max(numbers)
