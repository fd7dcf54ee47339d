"""The command `launch/plan.py` without a subcommand: a recipe's memory, time and cost on hardware."""

from __future__ import annotations

import argparse
import json
import math
from bisect import bisect_left

from launch.console import arguments, terminal
from launch.planning import carrying_nodes
from launch.planning.memory_fit import UNCOUNTED, fit, how
from launch.planning.prediction import forecast_text, hardware
from launch.planning.prediction.published_step import side_by_side
from launch.planning.resolved_plans import processes, resolve_on_machine
from recipes import catalog
from recipes.problems import ProblemsError, counted

RULES = (
    ("--tokens", "--steps, --set steps", "both say how long the training is"),
    ("--fits", "--recipe", "both name the recipe"),
    (
        "--fits",
        "--json, --tokens, --usd_per_gpu_hour",
        "it compares nodes; ask for one of them with --recipe",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a forecast."""
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument_group("on what, and for how long").add_argument
    add(
        "--ds_config",
        metavar="FILE",
        help="DeepSpeed JSON, or the name of one of ds_configs/ (default: the recipe's)",
    )
    fits = "whether this recipe fits, as written or with fewer data-parallel ranks, and if not with which "
    fits += "JSON it would; on each node of the catalogue, or that of --hardware"
    add("--fits", metavar="TABLE/ROW", help=fits)
    add(
        "--hardware",
        metavar="NODE",
        help=f"{hardware.ways_to_name()} (default: the recipe's)",
    )
    add(
        "--nodes",
        type=arguments.whole(1, 10**5),
        metavar="N",
        help="of them (default: 1; without --hardware as many as the layout takes)",
    )
    add(
        "--tokens",
        type=arguments.whole(1, 10**15),
        metavar="N",
        help="what training on N tokens takes, instead of the recipe's steps",
    )
    price = "price of a GPU for an hour (default: the catalogue's, which says whose and when, where it has one)"
    add(
        "--usd_per_gpu_hour", type=arguments.number(0, 10**6), metavar="USD", help=price
    )
    add("--json", action="store_true", help="every number, in bytes and seconds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the forecast and return exit code 0, whatever the verdict. Raises ProblemsError."""
    if args.fits:
        return _show_nodes(args)
    named = catalog.find(args.recipe)
    recipe = named.changed(args.set, args.tiny, args.steps)
    node = hardware.node_for(recipe, args.hardware)
    nodes = args.nodes or 1
    if not (args.nodes or args.hardware):
        nodes = math.ceil(processes(recipe) / node.gpus)
    name = named.name + ("-tiny" if args.tiny else "")
    if recipe.model.config:
        if args.json or args.tokens or args.usd_per_gpu_hour:
            raise ProblemsError([UNCOUNTED])
        world = recipe.parallel.dp or nodes * node.gpus or 1
        config = args.ds_config or recipe.ds_config
        planned = resolve_on_machine(recipe, config, world, node.machine)
        print(forecast_text.counted_page(planned, name, node, terminal.columns()))
        return 0
    placed = fit(recipe, node, nodes, args.ds_config)
    plan = placed.plan
    predicted = placed.forecast
    if plan is None or predicted is None:
        raise ProblemsError(placed.problems)
    sizes = recipe.sizes
    steps = recipe.steps
    if args.tokens:
        samples = math.ceil(
            args.tokens * recipe.batch.global_ / predicted.work.tokens_per_step
        )
        steps = bisect_left(range(samples), samples, key=sizes.samples)
    bill = predicted.bill(steps, sizes, args.usd_per_gpu_hour)
    if args.json:
        print(json.dumps(forecast_text.as_json(predicted, bill), indent=2))
        return 0
    page = forecast_text.page(predicted, name, bill, terminal.columns())
    fewer = recipe.parallel.dp not in (None, plan.layout.dp)
    if not (args.set or args.tiny or args.ds_config or fewer):
        forecast_text.add_published(page, plan, side_by_side(plan, predicted.node))
    idle = placed.gpus - placed.world
    notes = [f"planned {how(placed)}, for want of GPUs"] if fewer else []
    notes += [f"{counted(idle, 'GPU')} of {placed.gpus} stay idle"] if idle else []
    page.notes([*notes, *plan.notices])
    print(page)
    return 0


def _show_nodes(args: argparse.Namespace) -> int:
    """Print the nodes that carry a recipe and return exit code 0; 1: none does. Raises ProblemsError."""
    named = catalog.find(args.fits, "--fits")
    recipe = named.changed(args.set, args.tiny, args.steps)
    names = [args.hardware] if args.hardware else hardware.names()
    nodes = [hardware.find(name) for name in names]
    count = args.nodes or 1
    carriers = carrying_nodes.carriers(recipe, args.ds_config, nodes, count)
    print(carrying_nodes.page(recipe, named.name, carriers, count, terminal.columns()))
    return 0 if any(each.fit.fits for each in carriers) else 1
