"""The subcommand `launch/recipe.py show`: one recipe with its published numbers and launch lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ds_configs.findings import ConfigError
from ds_configs.plan import Plan
from launch.console import arguments, launch_lines, terminal
from launch.console.launch_lines import SCRIPT, deepspeed, quoted
from launch.console.text_table import aligned
from launch.planning import memory_fit
from launch.planning.resolved_plans import processes, published_plan
from launch.records.deviations import not_comparable
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
CHANGED = (
    "changed by --set or --tiny, so that what is known of the row's value does not hold"
)
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
    override = "override one field, as in pretrain.py; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=override)
    add("--tiny", action="store_true", help="the recipe as --tiny shrinks it")
    form = parser.add_mutually_exclusive_group().add_argument
    as_yaml = "the recipe as YAML, every value written out, and nothing else"
    form("--yaml", action="store_true", help=as_yaml)
    ds_json = "the DeepSpeed JSON as it would be resolved, and nothing else"
    form("--ds_json", action="store_true", help=ds_json)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the recipe and return the exit code; 2: it cannot be run as it is."""
    shown = ShownRecipe(args.recipe, args.tiny, args.set)
    if args.yaml:
        print(catalog.dump(shown.recipe), end="")
        return 0
    if args.ds_json:
        print(json.dumps(shown.resolved().ds, indent=2))
        return 0
    plan: Plan | ConfigError
    try:
        plan = shown.resolved()
    except ConfigError as error:
        plan = error
    print(shown.describe(plan, terminal.columns()))
    return 2 if isinstance(plan, ConfigError) else 0


@dataclass(frozen=True)
class ShownRecipe:
    """A recipe named by the user; `settings`: changes by --set."""

    name: str
    tiny: bool = False
    settings: Sequence[str] = ()

    @cached_property
    def recipe(self) -> Recipe:
        return catalog.load(self.name, self.settings, tiny=self.tiny)

    @cached_property
    def original(self) -> Recipe | None:
        """The row without --set and --tiny; None: it is no recipe without them."""
        try:
            return (
                catalog.load(self.name) if self.tiny or self.settings else self.recipe
            )
        except RecipeError:
            return None

    def resolved(self) -> Plan:
        """Resolve the plan on the row's hardware, whose GPUs decide an open dp. Raises ConfigError."""
        hardware = self.recipe.hardware
        gpus = None
        if hardware and self.recipe.parallel.dp is None and not self.tiny:
            gpus = hardware.gpus
        return published_plan(self.recipe, gpus)

    def describe(self, plan: Plan | ConfigError, width: int | None = None) -> str:
        """Describe the recipe in sections, in lines of `width` columns."""
        recipe, (table, row) = self.recipe, catalog.find(self.name)
        name = f"{table.name}/{row}"
        launch = list[str]()
        if isinstance(plan, ConfigError):
            resolved = [f"  cannot be run as it is: {line}" for line in plan.problems]
        else:
            hardware = str(recipe.hardware or "any")
            memory = memory_fit.describe(plan)
            around = Surroundings(hardware, memory=memory, more=self._derived(plan))
            resolved = [describe_plan(plan, name, around, width)]
            launch = [
                terminal.command(f"  {line}", width, hang=4)
                for line in self.launch_lines()
            ]
        explained = {**recipe.inferred, **recipe.differs, **recipe.unknown}
        changed = [key for key in explained if not self._is_own(key)]
        sections = {
            name: _indented(recipe.title, f"{table.title}.", table.note),
            "resolved": resolved,
            "published": _published(recipe.published, table, width),
            "not printed by the table: where it comes from": self._reasons(
                recipe.inferred
            ),
            "not as the source ran it": self._reasons(recipe.differs),
            "given by no source: what stands in": self._reasons(recipe.unknown),
            CHANGED: _indented(", ".join(changed)),
            "notes": _indented(recipe.note),
            "errata": _indented(*map(str, evidence.read(table).errata_of(row))),
            "launch": launch,
        }
        blocks = (
            "\n".join([title, *lines]) for title, lines in sections.items() if lines
        )
        return terminal.wrapped("\n\n".join(blocks), width)

    def _derived(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Yield sizes, and the published time in TFLOPS if the work is the row's."""
        published = self.recipe.published
        yield from _padded_size(plan)
        if published and published.time_per_iteration_s:
            other = not_comparable(self.original, plan, tiny=self.tiny)
            none = f"none: the published {published.time_per_iteration_s:g} s are of something else: {other}"
            yield "TFLOPS", none if other else _tflops(plan)
        elif published and published.tflops:
            yield (
                "TFLOPS",
                f"{published.tflops:g} printed, without a time; {COUNTED[published.tflops_by]}",
            )

    def _reasons(self, reasons: Mapping[str, str]) -> list[str]:
        """Return the reasons of keys with the row's own value."""
        lines: list[str] = []
        for key in filter(self._is_own, reasons):
            value = _value(self.recipe, key)
            head = key if isinstance(value, dict | list | None) else f"{key} = {value}"
            lines += _indented(f"{head}: {reasons[key]}")
        return lines

    def _is_own(self, key: str) -> bool:
        """Check whether a dotted key has the row's own value."""
        return self.original is not None and _value(self.recipe, key) == _value(
            self.original, key
        )

    def launch_lines(self) -> list[str]:
        """Return command lines for the row's hardware and for any machine."""
        script = f"{SCRIPT} {quoted(launch_lines.arguments(self.name, self.recipe.ds_config, self.settings))}"
        lines = list[str]()
        shrunk = self.recipe
        if not self.tiny:
            where, launcher = _launcher(self.recipe)
            lines = [f"# on {where}", f"{launcher} {script}"]
            try:
                shrunk = catalog.load(self.name, self.settings, tiny=True)
                published_plan(shrunk)
            # a setting that the smaller model cannot have
            except (RecipeError, ConfigError) as error:
                problems = [f"#   {problem}" for problem in error.problems]
                return [*lines, "# cannot be shrunk with these settings:", *problems]
        small = f"{deepspeed(1, processes(shrunk))} {script} --tiny"
        return [*lines, "# shrunk, on any machine, with the same code path", small]


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


def _published(
    published: Published | None, table: Table, width: int | None
) -> list[str]:
    if published is None:
        return []
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
    printed += [(name, str(value)) for name, value in more if value]
    return [aligned(printed, indent=2, width=width)]


def _value(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key as plain data."""
    value: Any = recipe.as_data()
    for part in key.split("."):
        value = (value or {}).get(part)
    return value


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


def _indented(*paragraphs: str | None) -> list[str]:
    """Return a line for each paragraph."""
    return [f"  {' '.join(text.split())}" for text in paragraphs if text]
