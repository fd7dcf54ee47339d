"""The nodes of the catalogue that carry a recipe, for `launch/plan.py --fits`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ds_configs.findings import ConfigError
from launch.planning.page import Page
from launch.planning.prediction import workload
from launch.planning.prediction.forecast import Forecast, forecast
from launch.planning.prediction.forecast_text import duration, errors
from launch.planning.prediction.hardware import Node
from launch.planning.resolved_plans import plan_on_nodes
from recipes.problems import counted
from recipes.schema import Recipe

# What keeps less on a GPU than the recipe's own JSON may, each slower than the one before.
SMALLER = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
HEADINGS = (
    "node",
    "GPUs",
    "GB each",
    "with",
    "GB needed",
    "s per step",
    "tokens/s",
    "whole run",
)


class Carrier(NamedTuple):
    """A node, and the first JSON that fits there or needs the least. `refused`: why the recipe cannot run."""

    node: Node
    ds_config: str
    forecast: Forecast | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.forecast is not None and self.forecast.verdict != "out of memory"

    @property
    def tokens_per_second(self) -> float:
        speed = self.forecast and self.forecast.speed
        return speed.tokens if speed else 0.0


def carriers(
    recipe: Recipe, ds_config: str | None, nodes: Iterable[Node], count: int | None
) -> list[Carrier]:
    """Return a carrier for each node, those that fit first and the fastest first.

    Args:
        ds_config: the only JSON to try; None: the recipe's, then those that keep less on a GPU.
        count: number of such nodes; None: as many as the layout takes.
    """
    files = (
        [ds_config] if ds_config else list(dict.fromkeys([recipe.ds_config, *SMALLER]))
    )
    found = [_on(recipe, files, node, count) for node in nodes]
    found.sort(
        key=lambda each: (not each.fits, bool(each.refused), -each.tokens_per_second)
    )
    return found


def _on(recipe: Recipe, files: Sequence[str], node: Node, count: int | None) -> Carrier:
    tried = []
    refused = ""
    for file in files:
        try:
            plan = plan_on_nodes(recipe, file, node, count)
        except ConfigError as error:
            refused = refused or str(error.problems[0])
            continue
        predicted = forecast(workload.of_plan(plan), node, unit=recipe.batch.unit)
        carrier = Carrier(node, file, predicted)
        if predicted.verdict == "fits":
            return carrier
        tried.append((max(predicted.missing), carrier))
    if not tried:
        return Carrier(node, files[0], None, refused)
    snug = next((carrier for _, carrier in tried if carrier.fits), None)
    return snug or min(tried, key=lambda each: each[0])[1]


def page(
    recipe: Recipe, name: str, found: Sequence[Carrier], width: int | None
) -> Page:
    """Describe the carriers in a table, and why others cannot run."""
    shown = Page(width)
    fitting = [each for each in found if each.fits]
    lacking = [each for each in found if each.forecast and not each.fits]
    shown.facts(
        ("recipe", name), ("fits", f"{len(fitting)} of {counted(len(found), 'node')}")
    )
    known = [errors(each.forecast) for each in found if each.forecast]
    shown.table(
        [_row(recipe, each) for each in fitting], HEADINGS, "lrrlrrrl", below=known[:1]
    )
    over = [(each.node.name, _size(each), each.ds_config) for each in lacking]
    if over:
        shown.table(over, ("out of memory", "GB needed of", "with"), "lrl")
    refused = [(each.node.name, each.refused) for each in found if each.refused]
    if refused:
        shown.table(refused, ("refused", "why"))
    best = next(iter(fitting), None)
    if best:
        own = (
            []
            if best.ds_config == recipe.ds_config
            else [f"--ds_config {best.ds_config}"]
        )
        words = " ".join([f"--recipe {name}", f"--hardware {best.node.name}", *own])
        shown.commands(f"python launch/plan.py {words}", above=["all of the first one"])
    return shown


def _row(recipe: Recipe, carrier: Carrier) -> tuple[str, ...]:
    found = carrier.forecast
    assert found
    node = carrier.node
    world = found.work.layout.world
    snug = " (snug)" if found.verdict == "snug" else ""
    placed = (
        node.name,
        str(world),
        f"{node.gpu.memory_bytes / 1e9:.0f}",
        carrier.ds_config,
    )
    needed = f"{found.fullest_rank.total / 1e9:.1f}{snug}"
    bill = found.bill(recipe.steps, recipe.sizes)
    if found.time is None or bill is None:
        return (
            *placed,
            needed,
            "",
            "",
            f"{node.gpu.title} has no {found.work.precision}",
        )
    tokens = f"{carrier.tokens_per_second:,.0f}"
    return (*placed, needed, f"{found.time.total:.3g}", tokens, duration(bill.seconds))


def _size(carrier: Carrier) -> str:
    found = carrier.forecast
    assert found
    if found.missing[1] > 0:
        return (
            f"{found.host / 1e9:,.0f} of {carrier.node.host.memory_gb:,.0f} in the host"
        )
    return f"{found.fullest_rank.total / 1e9:.0f} of {carrier.node.gpu.memory_bytes / 1e9:.0f}"
