"""The report of a proof as text."""

from __future__ import annotations

from collections.abc import Sequence

from launch.console import text_table
from launch.console.terminal import wrapped
from launch.experiments.proving.layout import DEGREES
from launch.experiments.proving.mistakes import Mistake, Shares
from launch.experiments.proving.task import Found
from launch.experiments.proving.verdict import First, Row
from recipes.problems import counted, some

HEADINGS = ("layout", "ranks", "loss", "grad norm", "gradients", "weights", "agrees")
SENTENCES = {
    "factor": "it is {factor:.4g} times as large{degrees}",
    "norm": "it is {factor:.4g} times as large, as it is clipped by another norm",
    "missing": "a share of the batch does not count: its shares count {counts} times",
    "counts": "shares of the batch do not count alike, but {counts} times",
    "means": "a mean is taken of each share of the batch, not over all tokens",
    "clipped": "each share's gradient is clipped before they are averaged",
    "piece": "it is so on {ranks} alone",
    "replica": "{ranks} {have} other numbers for the same elements: replicas that drifted",
    "scales": "{ranks} {have} it {counts} times as large: each scales it by its own, as by its own norm",
    "not summed": "the right one is a sum of what {ranks} have, {counts} times: it is not reduced over them",
    "random": "nothing of the batch explains it; the program draws at random, so perhaps another stream",
    "forward": "the loss differs, too, and no shares of the batch explain it: the forward pass is another",
    "initial": "before any step it is not as given, or as saved, on {ranks}",
    "history": "its gradient of this step is right, earlier ones in it are not: reset, or not loaded",
    "still": "it is not updated",
    "rate": "its gradient is right, its update {factor:.4g} times as large: the rate, or a step made twice",
    "decay": "its update is off by {factor:.2g} times the weight: weight decay",
    "update": "its gradient is right, the update is not",
    "other": "nothing of the batch explains it",
}
MOST_NAMED = 4  # tensors in a line
LEGEND = (
    "loss: largest absolute difference of a step or a validation; grad norm: largest relative one",
    "gradients: of the first step, largest relative L2 difference of a tensor",
    "weights: after the last step, largest difference of an element",
    "each figure and each tensor of each step has a bound of its own, that of rounding",
)


def report(found: Found, shares: Shares, rows: Sequence[Row], width: int | None) -> str:
    """Return the table of all layouts, and what is wrong with each."""
    cells = []
    said = [*LEGEND]
    if shares.random:
        said.append(
            "randomness: another seed gives another loss; layouts agree where they draw the same"
        )
    for row in rows:
        differences = (row.loss, row.norm, row.gradient, row.weight)
        shown = [
            f"{each:.1e}" if each == each else text_table.NOTHING
            for each in differences
        ]
        verdict = "yes" if row.agrees else "NO"
        if row.failure:
            verdict = "FAILED"
        cells.append((row.layout.name, row.layout.ranks, *shown, verdict))
        said += _about(row)
    losses = [*found.losses.values()]
    head = counted(len(losses), "step")
    if losses:
        head += f", loss {losses[0]:.4f} -> {losses[-1]:.4f} in one process"
    table = text_table.table(cells, HEADINGS, "lrrrrrl", width)
    return "\n".join(
        [
            f"{head}; differences from it:",
            table,
            *(wrapped(line, width) for line in said),
        ]
    )


def _about(row: Row) -> list[str]:
    """Return what is to be said of a layout."""
    name = row.layout.name
    lines = []
    if row.failure:
        lines.append(f"\n{name}: {row.failure}")
    if row.lost:
        lines.append(f"\n{name}: no rank has {some(row.lost, MOST_NAMED)}")
    if row.notes:
        lines.append(
            f"\n{name}: not in one process, so not compared: {some(row.notes, MOST_NAMED)}"
        )
    if row.unasked:
        lines.append(
            f"\n{name}: the adapter never asked for {some(row.unasked, MOST_NAMED)}"
        )
    if row.unread:
        lines.append(
            f"\n{name}: not compared, as the optimizer does not show it: {some(row.unread, MOST_NAMED)}"
        )
    if row.first:
        lines.append(f"\n{name}: {of_first(row.first)}")
    elif not row.failure and not row.loss_agrees:
        lines.append(f"\n{name}: the loss alone differs; every tensor agrees")
    elif not row.failure and not row.norm_agrees:
        lines.append(f"\n{name}: the gradient norm alone differs; every tensor agrees")
    return lines


def of_first(first: First) -> str:
    """Say which tensor differs first, and what it looks like."""
    beyond, every = first.alike
    ranks = _ranks(first.ranks)
    return (
        f"step {first.step}, {first.kind} of {first.name} is the first that differs, on {ranks}: by "
        f"{first.apart:.1e} (rounding: {first.bound:.1e}), as {beyond} of {every} do; {sentence(first.mistake)}"
    )


def sentence(mistake: Mistake) -> str:
    """Say what kind of mistake it looks like."""
    words = [DEGREES.get(each, each) for each in mistake.degrees]
    return SENTENCES[mistake.kind].format(
        factor=mistake.factor,
        degrees=f", as {' or '.join(words)}" if words else "",
        counts=", ".join(f"{round(each, 2) + 0.0:.2f}" for each in mistake.counts),
        ranks=_ranks(mistake.ranks),
        have="has" if len(mistake.ranks) == 1 else "have",
    )


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
