"""The nodes that carry a recipe, for `launch/plan.py --fits`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from launch.console.text_table import Page, duration
from launch.planning.memory_fit import Fit, fit, how
from launch.planning.prediction.forecast import Forecast
from launch.planning.prediction.forecast_text import errors
from launch.planning.prediction.hardware import Node
from recipes.problems import counted
from recipes.schema import Recipe

# What keeps less on a GPU than the recipe's own JSON may, each slower than the one before.
SMALLER = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
HEADINGS = (
    "node",
    "GPUs",
    "GB each",
    "GB needed",
    "s per step",
    "tokens/s",
    "whole run",
    "how",
)
LACKING = ("out of memory", "GB needed of", "would fit with")


class Carrier(NamedTuple):
    """A node, the verdict there, and the first JSON that would make the recipe fit if its own does not."""

    node: Node
    fit: Fit
    instead: str | None

    @property
    def tokens_per_second(self) -> float:
        speed = self.fit.forecast and self.fit.forecast.speed
        return speed.tokens if speed else 0.0


def carriers(
    recipe: Recipe, ds_config: str | None, nodes: Iterable[Node], count: int
) -> list[Carrier]:
    """Return a carrier for `count` of each node, those that fit first and the fastest first.

    ds_config: the only JSON to try; None: the recipe's.
    """
    tried = []
    for node in nodes:
        verdict = fit(recipe, node, count, ds_config)
        instead = None
        if verdict.forecast and not verdict.fits and not ds_config:
            others = (file for file in SMALLER if fit(recipe, node, count, file).fits)
            instead = next(others, None)
        tried.append(Carrier(node, verdict, instead))
    tried.sort(
        key=lambda each: (
            not each.fit.fits,
            each.fit.forecast is None,
            -each.tokens_per_second,
        )
    )
    return tried


def page(
    recipe: Recipe, name: str, tried: Sequence[Carrier], count: int, width: int | None
) -> Page:
    """Describe the carriers in a table, and why others cannot run."""
    shown = Page(width)
    fitting = []
    lacking = []
    refused = []
    known = []
    for each in tried:
        predicted = each.fit.forecast
        if predicted is None:
            refused.append((each.node.name, "; ".join(map(str, each.fit.problems))))
            continue
        known.append(errors(predicted))
        if each.fit.fits:
            fitting.append(_row(recipe, each, predicted))
        else:
            lacking.append((each.node.name, _size(predicted), each.instead or ""))
    places = f"{len(fitting)} of {counted(len(tried), 'kind')} of node, {count} of each"
    shown.facts(("recipe", name), ("fits", places))
    if fitting:
        shown.table(fitting, HEADINGS, "lrrrrrll")
    if lacking:
        shown.table(lacking, LACKING, "lrl")
    if refused:
        shown.table(refused, ("refused", "why"))
    shown.text(*known[:1])
    best = next((each for each in tried if each.fit.fits or each.instead), None)
    if best:
        words = [f"--recipe {name}", f"--hardware {best.node.name}"]
        words += [f"--nodes {count}"] if count > 1 else []
        words += [f"--ds_config {best.instead}"] if best.instead else []
        line = f"python launch/plan.py {' '.join(words)}"
        shown.commands(line, above=["all of the first one"])
    return shown


def _row(recipe: Recipe, carrier: Carrier, predicted: Forecast) -> tuple[str, ...]:
    node = carrier.node
    placed = (
        node.name,
        str(carrier.fit.world),
        f"{node.gpu.memory_bytes / 1e9:.0f}",
        f"{predicted.fullest_rank.total / 1e9:.1f}",
    )
    bill = predicted.bill(recipe.steps, recipe.sizes)
    timed = "", "", f"{node.gpu.title} has no {predicted.work.precision}"
    if predicted.time and bill:
        tokens = f"{carrier.tokens_per_second:,.0f}"
        timed = f"{predicted.time.total:.3g}", tokens, duration(bill.seconds)
    return *placed, *timed, how(carrier.fit)


def _size(predicted: Forecast) -> str:
    full = predicted.binding
    said = f"{full.needed / 1e9:,.0f} of {full.room / 1e9:,.0f}"
    return said if full.place == "GPU" else f"{said} in the host"
