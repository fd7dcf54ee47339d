"""`launch/plan.py` without a subcommand: memory, verdict, time and cost of one recipe on given hardware."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path

from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from ds_configs.sections.zero import NVME_VARIABLE
from launch.console import arguments, terminal
from launch.console.text_table import table
from launch.planning.prediction import forecast_text, hardware, workload
from launch.planning.prediction.forecast import Forecast, forecast
from launch.planning.prediction.published_step import as_published, printed_seconds
from recipes import catalog
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a forecast."""
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument_group("on what, and for how long").add_argument
    config = "DeepSpeed JSON, or the name of one of ds_configs/ (default: the recipe's)"
    add("--ds_config", metavar="FILE", help=config)
    node = f"{', '.join(hardware.names())}, this (measured once), or FILE.yaml:NODE of your own"
    add("--hardware", metavar="NODE", help=f"{node} (default: the recipe's)")
    add("--remeasure", action="store_true", help="measure this machine again (with --hardware this)")
    nodes = "nodes (default: as many as the layout takes)"
    add("--nodes", type=arguments.whole(1, 10**5), metavar="N", help=nodes)
    tokens = "what training on N tokens takes, instead of the recipe's steps"
    add("--tokens", type=arguments.whole(1, 10**15), metavar="N", help=tokens)
    add("--json", action="store_true", help="every number, in bytes and seconds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0: shown, whatever the verdict. Raises ProblemsError."""
    recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
    name = catalog.full_name(args.recipe) + ("-tiny" if args.tiny else "")
    node = node_of(recipe, args.hardware, remeasure=args.remeasure)
    plan = planned(recipe, args.ds_config or recipe.ds_config, node, args.nodes)
    work = workload.of_plan(plan)
    found = forecast(work, shared(node, plan.layout.world))
    steps = recipe.steps
    if args.tokens:
        steps = math.ceil(args.tokens / work.tokens_per_step)
    bill = found.bill(steps)
    if args.json:
        print(json.dumps(forecast_text.as_json(found, bill), indent=2))
        return 0
    width = terminal.columns()
    print(forecast_text.describe(found, name=name, bill=bill, width=width))
    as_printed = not (args.set or args.tiny or args.ds_config)
    if as_printed and (beside := published_beside(plan, found)):
        print("\n" + beside)
    for notice in plan.notices:
        print(terminal.wrapped(f"\n  ! {notice}", width))
    return 0


def node_of(recipe: Recipe, asked: str | None, *, remeasure: bool = False) -> hardware.Node:
    """The node that the user names, or the recipe's. Raises ProblemsError: neither is there."""
    named = asked or (recipe.hardware.node if recipe.hardware else None)
    if named == hardware.THIS:
        return hardware.this(again=remeasure)
    if named is None:
        came, rule = "no --hardware, and the recipe names none", "a plan is for a kind of node"
        fix = f"--hardware {', '.join(hardware.names()[:6])}, … or this"
        raise ProblemsError([Problem("--hardware", came, rule, fix)])
    return hardware.find(named)


def planned(recipe: Recipe, ds_config: str | Path, node: hardware.Node, nodes: int | None) -> Plan:
    """The recipe on such nodes. Raises ConfigError with everything that cannot work."""
    world = None
    if recipe.parallel.dp is None and not node.is_cpu:
        world = (nodes or 1) * node.gpus
    elif nodes and not node.is_cpu:
        asked = math.prod(recipe.parallel.model_parallel) * (recipe.parallel.dp or 1)
        # A node that the layout leaves partly empty is its user's to choose.
        world = asked if (nodes - 1) * node.gpus < asked <= nodes * node.gpus else nodes * node.gpus
    return resolve(recipe, ds_config, world, machine_of(node), {NVME_VARIABLE: tempfile.gettempdir()})


def machine_of(node: hardware.Node) -> Machine:
    """What the resolver is told of a node of the catalogue."""
    rates = node.gpu.tflops
    kind = "cpu" if node.is_cpu else "cuda"
    return Machine(kind, fp16="fp16" in rates, bf16="bf16" in rates, compiler=True, libaio=True)


def shared(node: hardware.Node, ranks: int) -> hardware.Node:
    """A machine without GPUs as its ranks see it: each has a share of the cores, memory and bandwidth."""
    return node.shared_by(ranks) if node.is_cpu else node


def published_beside(plan: Plan, found: Forecast) -> str:
    """What the row's source printed, next to the same step as its system ran it; empty: nothing."""
    recipe = plan.recipe
    published, step = recipe.published, as_published(plan)
    own = recipe.hardware.node if recipe.hardware else None
    if published is None or step is None or found.node.name != own:
        return ""
    theirs = forecast(step, found.node)
    pairs: list[tuple[str, float, float]] = []
    seconds = printed_seconds(recipe, published)
    if theirs.time and theirs.speed:
        if seconds:
            pairs.append(("seconds per step", theirs.time.total, seconds))
        if published.tflops:
            counted = theirs.speed.tflops if published.tflops_by == "formula" else theirs.speed.exact_tflops
            pairs.append(("TFLOPS per GPU", counted, published.tflops))
    if published.cached_gb:
        cached = theirs.fullest.cached(found.node.gpu.memory_bytes) / hardware.GIB
        pairs.append(("cached, GiB per GPU", cached, published.cached_gb))
    rows = [[what, f"{ours:.4g}", f"{theirs:.4g}", f"{ours / theirs:.2f}"] for what, ours, theirs in pairs]
    if published.oom:
        rows.append(["memory", theirs.verdict, "out of memory", ""])
    if not rows:
        return ""
    headings = [f"as {published.software} ran it", "predicted", "published", "ratio"]
    return "\n".join("  " + line for line in table(rows, headings, "lrrr").splitlines())
