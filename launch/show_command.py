"""`recipes.py show`: one recipe with everything resolved, what was published, and the line that launches it."""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ds_configs.resolver import ConfigError, Plan, available
from launch.fitting import processes, published_plan, state_bytes
from launch.plan_text import describe_plan
from launch.verification import errata_of
from modeling import cost
from recipes import catalog
from recipes.schema import Published, Recipe
from recipes.tables import Table

WIDTH = 120


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "show", help="everything about one recipe", allow_abbrev=False,
        description="Show one recipe: everything resolved, what was published, what is inferred or unknown, and how to launch it.",
    )  # fmt: skip
    parser.add_argument("recipe", metavar="TABLE/ROW", help="a row of recipes/, or of your own YAML file as file.yaml/row")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one field, as in pretrain.py; repeatable")
    parser.add_argument("--tiny", action="store_true", help="the recipe as --tiny shrinks it")
    parser.add_argument("--yaml", action="store_true", help="the recipe as YAML, every value written out, and nothing else")
    parser.add_argument("--json", action="store_true", help="the DeepSpeed JSON as it would be resolved, and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    recipe = catalog.load(args.recipe, args.set, tiny=args.tiny)
    if args.yaml:
        print(catalog.dump(recipe), end="")
    elif args.json:
        print(json.dumps(published_plan(recipe).ds, indent=2))
    else:
        print(describe(recipe, *catalog.find(args.recipe), given=args.recipe, tiny=args.tiny, settings=args.set))
    return 0


def describe(recipe: Recipe, table: Table, row: str, *, given: str, tiny: bool = False, settings: Sequence[str] = ()) -> str:
    """Sections of text; `given` is the name as the user wrote it, `settings` what --set changed."""
    try:
        plan = published_plan(recipe)
        hardware = str(recipe.hardware or "any")
        resolved = [describe_plan(plan, name=f"{table.name}/{row}", hardware=hardware, run_directory=None, here=False)]
        resolved += _aligned(derived(plan, as_published=not (tiny or settings)), width=len("model states"))
    except ConfigError as error:  # a row of a user's file
        plan, resolved = None, [f"  cannot be run as it is: {line}" for line in str(error).splitlines()]
    sections = [
        (f"{table.name}/{row}", _wrapped([recipe.title, f"{table.title}.", *([table.note] if table.note else [])])),
        ("resolved", resolved),
        ("published", _published(recipe.published, table)),
        ("not printed by the table: where it comes from", _reasons(recipe, recipe.inferred)),
        ("given by no source: what stands in", _reasons(recipe, recipe.unknown)),
        ("notes", _wrapped([recipe.note] if recipe.note else [])),
        ("errata", _wrapped(errata_of(f"{table.name}/{row}"))),
        ("launch", [f"  {line}" for line in launch_lines(recipe, given, tiny, settings)] if plan else []),
    ]
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections if lines)


def derived(plan: Plan, *, as_published: bool = True) -> Iterator[tuple[str, str]]:
    """What follows from the recipe: sizes, memory, and unless it was changed the published time in both kinds of TFLOPS."""
    recipe, layout = plan.recipe, plan.layout
    per_rank = cost.parameters_per_rank(recipe.model, recipe.sequence_length, plan.padded_vocab, layout.tp)
    if layout.tp > 1:
        yield "tensor ranks", f"{per_rank:,} parameters each, {layout.tp * per_rank:,} in all, with duplicates and padding"
    places = [(size, place) for size, place in zip(state_bytes(plan), ("on its GPU", "in CPU memory", "on NVMe"), strict=True) if size]
    held = ", ".join(f"{size / 1e9:.3g} GB {place}" for size, place in places)
    yield "fullest rank", f"model states while it steps: {held}"
    published = recipe.published
    if as_published and published and published.time_per_iteration_s:
        yield "TFLOPS", f"{_tflops(plan, published.time_per_iteration_s)} in the published {published.time_per_iteration_s:g} s, per GPU"


def _tflops(plan: Plan, seconds: float) -> str:
    recipe, layout = plan.recipe, plan.layout
    gpus = (recipe.hardware.gpus if recipe.hardware else None) or layout.world
    checkpointing = recipe.checkpoint_interval > 0
    count = cost.parameters(recipe.model, recipe.sequence_length)
    by_formula = cost.published_tflops(count, recipe.sequence_length, layout.global_batch, seconds, gpus, checkpointing=checkpointing)
    predictions = recipe.predictions if recipe.model.family == "bert" else None
    flops = cost.exact_flops_per_step(
        recipe.model, recipe.sequence_length, layout.global_batch, padded_vocab=plan.padded_vocab, checkpointing=checkpointing,
        predictions=predictions,
    )  # fmt: skip
    exact = cost.exact_tflops(flops, seconds, gpus)
    peak = recipe.hardware.peak_tflops if recipe.hardware else None
    share = f" ({100 * exact / peak:.1f} % of {peak:g})" if peak else ""
    return f"{by_formula:.4g} by the documents' formula with the true size, {exact:.4g} by exact count{share}"


def _published(published: Published | None, table: Table) -> list[str]:
    if published is None:
        return []
    cells = zip(table.columns, (cell.strip() for cell in (published.row or "").split("|")), strict=False)
    printed = [(name, cell or "(blank)") for name, cell in cells]
    more = [
        ("ran", published.framework), ("held-out loss", published.validation_loss), ("date", published.date), ("source", published.source),
    ]  # fmt: skip
    impossible = [("cannot have been", f"{key} = {value}") for key, value in published.printed.items()]
    return _aligned([*printed, *impossible, *((name, str(value)) for name, value in more if value)])


def _reasons(recipe: Recipe, reasons: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for key, reason in reasons.items():
        value = _value(recipe, key)
        head = f"{key}{f' = {value}' if value else ''}: "
        lines += textwrap.wrap(head + reason, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return lines


def _value(recipe: Recipe, key: str) -> str:
    """The value of a dotted key, where it is short enough to stand in a line."""
    value = recipe.model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        value = (value or {}).get(part)
    return "" if isinstance(value, dict | list) or value is None else str(value)


def launch_lines(recipe: Recipe, name: str, tiny: bool = False, settings: Sequence[str] = ()) -> list[str]:
    """Command lines: for the hardware of the row, and for a machine without it. `settings` are in `recipe` already."""
    world, per_node = processes(recipe), recipe.hardware.gpus_per_node if recipe.hardware else None
    script = f"launch/pretrain.py --ds_config {_json_file(recipe)} --recipe {shlex.quote(name)}"
    sets = "".join(f" --set {shlex.quote(setting)}" for setting in settings)
    lines = []
    if not tiny:
        if recipe.parallel.dp is None:
            lines += ["# on any number of GPUs of one machine that divides the batch", f"deepspeed {script}{sets}"]
        elif per_node and world > per_node:
            lines += [f"# on {-(-world // per_node)} machines of {per_node} GPUs; hosts has a line 'name slots={per_node}' for each",
                      f"deepspeed --hostfile hosts --num_nodes {-(-world // per_node)} --num_gpus {per_node} {script}{sets}"]  # fmt: skip
        else:
            lines += [f"# on {world} GPU{'s' if world > 1 else ''} of one machine", f"deepspeed --num_gpus {world} {script}{sets}"]
        try:
            shrunk = catalog.load(name, settings, tiny=True)
            published_plan(shrunk)
        except (catalog.RecipeError, ConfigError) as error:  # a setting that the smaller model cannot have
            return [*lines, "# cannot be shrunk with these settings:", *(f"#   {problem}" for problem in error.problems)]
    else:
        shrunk = recipe
    small = processes(shrunk)
    return [*lines, "# shrunk, on any machine, with the same code path", f"deepspeed --num_gpus {small} {script} --tiny{sets}"]


def _json_file(recipe: Recipe) -> str:
    """The DeepSpeed JSON of the recipe as an argument: one of ds_configs/ by its path, the user's own as it is written."""
    name = recipe.ds_config
    return f"ds_configs/{name}.json" if name in available() else shlex.quote(name)


def _aligned(pairs: Iterable[tuple[str, object]], width: int = 0) -> list[str]:
    pairs = list(pairs)
    width = width or max((len(name) for name, _ in pairs), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in pairs]


def _wrapped(paragraphs: Sequence[str]) -> list[str]:
    return [line for text in paragraphs for line in textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")]
