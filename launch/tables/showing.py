"""The subcommand `launch/recipe.py show`: one recipe with its published numbers and launch lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
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
from modeling import cost
from recipes import catalog
from recipes.families import MASKED_LOSS
from recipes.problems import RecipeError, counted
from recipes.schema import Published, Recipe
from recipes.tables import Table

COUNTED = {
    "formula": "by Jean Zay's formula with the printed size",
    "exact": "by exact count, which is NVIDIA's",
}
ABOUT = """\
Show one recipe: everything resolved, what was published, inferred or unknown,
and how to launch it."""


def add_parser(commands: Any) -> None:
    """Add the subcommand `show` to the subparsers of launch/recipe.py."""
    parser = arguments.subcommand(
        commands, "show", "everything about one recipe", ABOUT
    )
    name = "a row of recipes/, or of your own YAML file as file.yaml/row"
    add = parser.add_argument
    add("recipe", metavar="TABLE/ROW", help=name)
    form = parser.add_mutually_exclusive_group().add_argument
    as_yaml = "the recipe as YAML, every value written out, and nothing else"
    form("--yaml", action="store_true", help=as_yaml)
    ds_json = "the DeepSpeed JSON as it would be resolved, and nothing else"
    form("--ds_json", action="store_true", help=ds_json)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the recipe and return the exit code; 2: it cannot be run as it is."""
    table, row = catalog.find(args.recipe)
    recipe = catalog.load(args.recipe)
    if args.yaml:
        print(catalog.dump(recipe), end="")
        return 0
    if args.ds_json:
        print(json.dumps(resolved(recipe).ds, indent=2))
        return 0
    width = terminal.columns()
    page = Page(width)
    name = f"{table.name}/{row}"
    about = (recipe.title, f"{table.title}.", table.note)
    page.text(*map(_one_line, about), hang=2, heading=[name])
    launch = list[str]()
    code = 0
    try:
        plan = resolved(recipe)
        memory = memory_fit.describe(plan)
        hardware = str(recipe.hardware or "any")
        around = Surroundings(hardware, memory=memory, more=_derived(plan))
        page.add([describe_plan(plan, name, around, width)], heading=["resolved"])
        launch = launch_lines_of(args.recipe, recipe)
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
        "errata": map(str, evidence.read(table).errata_of(row)),
    }
    for title, texts in sections.items():
        page.text(*map(_one_line, texts), hang=2, heading=[title])
    page.commands(*launch, heading=["launch"])
    print(page)
    return code


def resolved(recipe: Recipe) -> Plan:
    """Resolve the plan on the row's hardware, whose GPUs decide an open dp. Raises ConfigError."""
    gpus = None
    if recipe.hardware and recipe.parallel.dp is None:
        gpus = recipe.hardware.gpus
    return published_plan(recipe, gpus)


def launch_lines_of(name: str, recipe: Recipe) -> list[str]:
    """Return command lines for the row's hardware and for any machine."""
    words = launch_lines.arguments(name, recipe.ds_config, ())
    script = f"{SCRIPT} {quoted(words)}"
    where, launcher = _launcher(recipe)
    lines = [f"# on {where}", f"{launcher} {script}"]
    try:
        shrunk = catalog.load(name, tiny=True)
        published_plan(shrunk)
    # what the smaller model cannot have
    except (RecipeError, ConfigError) as error:
        problems = [f"#   {problem}" for problem in error.problems]
        return [*lines, "# cannot be shrunk:", *problems]
    small = f"{deepspeed(1, processes(shrunk))} {script} --tiny"
    return [*lines, "# shrunk, on any machine, with the same code path", small]


def _derived(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield sizes, and the published time in TFLOPS."""
    published = plan.recipe.published
    yield from _padded_size(plan)
    if published and published.time_per_iteration_s:
        yield "TFLOPS", _tflops(plan)
    elif published and published.tflops:
        count = COUNTED[published.tflops_by]
        yield "TFLOPS", f"{published.tflops:g} printed, without a time; {count}"


def _reasons(recipe: Recipe, kind: str) -> list[str]:
    """Return the reasons of a kind, each with its key and the key's value."""
    lines: list[str] = []
    for key, reason in getattr(recipe, kind).items():
        value = lookup(recipe.as_data(), key)
        head = key if isinstance(value, dict | list | None) else f"{key} = {value}"
        lines.append(f"{head}: {reason}")
    return lines


def _padded_size(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the parameters by Megatron-LM's count, if it differs."""
    recipe = plan.recipe
    tp = plan.layout.tp
    per_rank = cost.parameters_per_rank(
        recipe.model, recipe.positions, plan.padded_vocab, tp
    )
    count = tp * per_rank
    if count == cost.parameters(recipe.model, recipe.positions):
        return
    printed = recipe.published.parameters if recipe.published else None
    remark = ""
    if printed is not None:
        remark = ", as printed" if printed == count else f"; {printed:,} is printed"
    if tp > 1:
        in_all = f"{count:,} in all, with duplicates and padding{remark}"
        yield "tensor ranks", f"{per_rank:,} parameters each, {in_all}"
    else:
        yield "padded", f"{count:,} with the padded vocabulary{remark}"


def _tflops(plan: Plan) -> str:
    """Describe the published time in both kinds of TFLOPS, and name the document's kind."""
    recipe = plan.recipe
    layout = plan.layout
    published = recipe.published
    hardware = recipe.hardware
    assert published and published.time_per_iteration_s
    seconds = published.time_per_iteration_s
    gpus = (hardware and hardware.gpus) or layout.world
    by_formula, exact = cost.tflops(
        recipe, plan.padded_vocab, layout.global_batch, seconds, gpus
    )
    peak = hardware.peak_tflops if hardware else None
    share = f" ({100 * exact / peak:.1f} % of {peak:g})" if peak else ""
    counted = "the row prints none"
    if published.tflops:
        counted = f"{published.tflops:g} is printed, {COUNTED[published.tflops_by]}"
    return (
        f"{by_formula:.4g} by Jean Zay's formula with the true size, {exact:.4g} by exact count{share} "
        f"in the published {seconds:g} s, per GPU; {counted}"
    )


def _published(published: Published, table: Table) -> list[tuple[str, str]]:
    cells = zip(
        table.columns,
        (cell.strip() for cell in (published.row or "").split("|")),
        strict=False,
    )
    printed = [(name, cell or "(blank)") for name, cell in cells]
    printed += [
        ("cannot have been", f"{key} = {value}")
        for key, value in published.printed.items()
    ]
    loss = (f"held-out {MASKED_LOSS.name}", published.validation_loss)
    more = [("ran", published.framework), loss]
    more += score_lines(published)
    more += [("date", published.date), ("source", published.source)]
    return printed + [(name, str(value)) for name, value in more if value]


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
