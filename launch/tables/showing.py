"""The subcommand `launch/recipe.py show`: one recipe with its published numbers and launch lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from ds_configs.findings import ConfigError, lookup
from ds_configs.plan import Plan
from launch.console import arguments, launch_lines, terminal
from launch.console.launch_lines import SCRIPT, deepspeed, quoted
from launch.console.text_table import Page
from launch.planning import memory_fit
from launch.planning.resolved_plans import processes, published_plan
from launch.records.plan_text import Surroundings, describe_plan
from launch.tables import evidence
from launch.tables.scores import score_lines
from recipes import catalog
from recipes.families import MASKED_LOSS
from recipes.problems import RecipeError, counted
from recipes.schema import Published, Recipe
from recipes.tables import Table

ABOUT = """\
Show one recipe: everything resolved, what was published, inferred or unknown,
and how to launch it."""


def add_parser(commands: Any) -> None:
    """Add the subcommand `show` to the subparsers of launch/recipe.py."""
    parser = arguments.subcommand(
        commands, "show", "everything about one recipe", ABOUT
    )
    parser.add_argument(
        "recipe",
        metavar="TABLE/ROW",
        help="a row of recipes/, or of your own YAML file as file.yaml/row",
    )
    form = parser.add_mutually_exclusive_group().add_argument
    form(
        "--yaml",
        action="store_true",
        help="the recipe as YAML, every value written out, and nothing else",
    )
    form(
        "--ds_json",
        action="store_true",
        help="the DeepSpeed JSON as it would be resolved, and nothing else",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the recipe and return the exit code; 2: it cannot be run as it is."""
    named = catalog.find(args.recipe)
    table = named.table
    recipe = named.recipe
    if args.yaml:
        print(catalog.dump(recipe), end="")
        return 0
    if args.ds_json:
        print(json.dumps(resolved(recipe).ds, indent=2))
        return 0
    width = terminal.columns()
    page = Page(width)
    name = named.name
    about = (recipe.title, f"{table.title}.", table.note)
    page.text(*map(_one_line, about), hang=2, heading=[name])
    launch = list[str]()
    code = 0
    try:
        plan = resolved(recipe)
        memory = memory_fit.describe(plan)
        around = Surroundings(str(recipe.hardware or "any"), memory=memory)
        page.add([describe_plan(plan, name, around, width)], heading=["resolved"])
        launch = launch_lines_of(args.recipe, named)
    except ConfigError as error:
        wrong = (f"cannot be run as it is: {line}" for line in error.problems)
        page.text(*wrong, hang=2, heading=["resolved"])
        code = 2
    if recipe.published:
        page.facts(*_published(recipe.published, table), heading=["published"])
    sections: dict[str, Iterable[str | None]] = {
        "not printed by the table: where it comes from": _reasons(recipe, "inferred"),
        "not as the source ran it": _reasons(recipe, "differs"),
        "given by no source: what stands in": _reasons(recipe, "unknown"),
        "notes": [recipe.note],
        "errata": map(str, evidence.read(table).errata_of(named.row)),
    }
    for title, texts in sections.items():
        page.text(*map(_one_line, texts), hang=2, heading=[title])
    page.commands(*launch, heading=["launch"])
    print(page)
    return code


def resolved(recipe: Recipe) -> Plan:
    """Resolve the plan on the row's hardware, whose GPUs decide an open dp. Raises ConfigError."""
    chosen = recipe.parallel.dp is None and recipe.hardware
    return published_plan(recipe, chosen.gpus if chosen else None)


def launch_lines_of(name: str, named: catalog.NamedRecipe) -> list[str]:
    """Return command lines for the row's hardware and for any machine."""
    recipe = named.recipe
    words = launch_lines.arguments(name, recipe.ds_config, ())
    script = f"{SCRIPT} {quoted(words)}"
    where, launcher = _launcher(recipe)
    lines = [f"# on {where}", f"{launcher} {script}"]
    try:
        shrunk = named.changed(tiny=True)
        published_plan(shrunk)
    # what the smaller model cannot have
    except (RecipeError, ConfigError) as error:
        problems = [f"#   {problem}" for problem in error.problems]
        return [*lines, "# cannot be shrunk:", *problems]
    small = f"{deepspeed(1, processes(shrunk))} {script} --tiny"
    return [*lines, "# shrunk, on any machine, with the same code path", small]


def _reasons(recipe: Recipe, kind: str) -> list[str]:
    """Return the reasons of a kind, each with its key and the key's value."""
    lines: list[str] = []
    for key, reason in getattr(recipe, kind).items():
        value = lookup(recipe.as_data(), key)
        head = key if isinstance(value, dict | list | None) else f"{key} = {value}"
        lines.append(f"{head}: {reason}")
    return lines


def _published(published: Published, table: Table) -> list[tuple[str, str]]:
    cells = zip(table.columns, (published.row or "").split("|"), strict=False)
    lines = [(name, cell.strip() or "(blank)") for name, cell in cells]
    for key, value in published.printed.items():
        lines.append(("cannot have been", f"{key} = {value}"))
    for name, said in (
        ("ran", published.framework),
        (f"held-out {MASKED_LOSS.name}", published.validation_loss),
        *score_lines(published),
        ("date", published.date),
        ("source", published.source),
    ):
        if said:
            lines.append((name, str(said)))
    return lines


def _launcher(recipe: Recipe) -> tuple[str, str]:
    """Return a description of the recipe's machines, and the launcher for them."""
    world = processes(recipe)
    per_node = recipe.hardware.gpus_per_node if recipe.hardware else None
    if recipe.parallel.dp is None:
        return "any number of GPUs of one machine that divides the batch", "deepspeed"
    if per_node and world > per_node:
        nodes = -(-world // per_node)
        where = f"{nodes} machines of {per_node} GPUs; hosts has a line 'name slots={per_node}' for each"
        return where, deepspeed(nodes, per_node)
    return f"{counted(world, 'GPU')} of one machine", deepspeed(1, world)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
