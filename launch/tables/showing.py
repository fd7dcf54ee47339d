"""`recipes.py show`: one recipe with everything resolved, what was published, and the line that launches it."""

from __future__ import annotations

import argparse
import json
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ds_configs.jsonfile import ConfigError, available
from ds_configs.plan import Plan
from launch.planning.comparability import not_comparable
from launch.planning.memory_fit import processes, published_plan, state_bytes
from launch.planning.plan_text import describe_plan
from launch.tables.verifying.verification import errata_of
from modeling import cost
from recipes import catalog
from recipes.problems import RecipeError
from recipes.schema import Published, Recipe
from recipes.tables import Table

WIDTH = 120
COUNTED = {
    "formula": "by Jean Zay's formula with the printed size",
    "exact": "by exact count, which is NVIDIA's",
}


def add_parser(commands) -> None:
    parser = commands.add_parser(
        "show", help="everything about one recipe", allow_abbrev=False,
        description="Show one recipe: everything resolved, what was published, what is inferred or unknown, and how to launch it.",
    )  # fmt: skip
    parser.add_argument(
        "recipe", metavar="TABLE/ROW", help="a row of recipes/, or of your own YAML file as file.yaml/row"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one field, as in pretrain.py; repeatable",
    )
    parser.add_argument("--tiny", action="store_true", help="the recipe as --tiny shrinks it")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--yaml", action="store_true", help="the recipe as YAML, every value written out, and nothing else"
    )
    form.add_argument(
        "--ds_json", action="store_true", help="the DeepSpeed JSON as it would be resolved, and nothing else"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    recipe = catalog.load(args.recipe, args.set, tiny=args.tiny)
    if args.yaml:
        print(catalog.dump(recipe), end="")
        return 0
    if args.ds_json:
        print(json.dumps(planned(recipe, args.tiny).ds, indent=2))
        return 0
    plan: Plan | ConfigError
    try:
        plan = planned(recipe, args.tiny)
    except ConfigError as error:
        plan = error
    print(
        describe(
            recipe, plan, *catalog.find(args.recipe), given=args.recipe, tiny=args.tiny, settings=args.set
        )
    )
    return 2 if isinstance(plan, ConfigError) else 0


def planned(recipe: Recipe, tiny: bool = False) -> Plan:
    """The plan on the row's hardware, whose GPUs decide where the recipe leaves dp open. Raises ConfigError where it cannot run there."""
    gpus = recipe.hardware.gpus if recipe.hardware else None
    return published_plan(recipe, gpus if recipe.parallel.dp is None and not tiny else None)


def describe(
    recipe: Recipe,
    plan: Plan | ConfigError,
    table: Table,
    row: str,
    *,
    given: str,
    tiny: bool = False,
    settings: Sequence[str] = (),
) -> str:
    """Sections of text; `given` is the name as the user wrote it, `settings` what --set changed."""
    original = _original(recipe, given, changed=bool(tiny or settings))
    if isinstance(plan, ConfigError):
        resolved = [f"  cannot be run as it is: {line}" for line in plan.problems]
    else:
        hardware = str(recipe.hardware or "any")
        resolved = [
            describe_plan(plan, name=f"{table.name}/{row}", hardware=hardware, run_directory=None, here=False)
        ]
        resolved += _aligned(derived(plan, original, tiny=tiny), width=len("model states"))
    lines = {
        name: _reasons(recipe, original, getattr(recipe, name)) for name in ("inferred", "differs", "unknown")
    }
    sections = [
        (
            f"{table.name}/{row}",
            _wrapped([recipe.title, f"{table.title}.", *([table.note] if table.note else [])]),
        ),
        ("resolved", resolved),
        ("published", _published(recipe.published, table)),
        ("not printed by the table: where it comes from", lines["inferred"]),
        ("not as the source ran it", lines["differs"]),
        ("given by no source: what stands in", lines["unknown"]),
        (
            "changed by --set or --tiny, so that what is known of the row's value does not hold",
            _wrapped([_changed(recipe, original)]),
        ),
        ("notes", _wrapped([recipe.note] if recipe.note else [])),
        ("errata", _wrapped(errata_of(f"{table.name}/{row}"))),
        (
            "launch",
            [f"  {line}" for line in launch_lines(recipe, given, tiny, settings)]
            if isinstance(plan, Plan)
            else [],
        ),
    ]
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections if lines)


def _original(recipe: Recipe, given: str, *, changed: bool) -> Recipe | None:
    """The row without --set and --tiny; None where it is no recipe without them."""
    try:
        return catalog.load(given) if changed else recipe
    except RecipeError:
        return None


def derived(plan: Plan, original: Recipe | None, *, tiny: bool = False) -> Iterator[tuple[str, str]]:
    """What follows from the recipe: sizes, memory, and where its work is the row's the published time in both kinds of TFLOPS."""
    recipe, published = plan.recipe, plan.recipe.published
    yield from _padded_size(plan)
    places = [
        (size, place)
        for size, place in zip(state_bytes(plan), ("on its GPU", "in CPU memory", "on NVMe"), strict=True)
        if size
    ]
    held = ", ".join(f"{size / 1e9:.3g} GB {place}" for size, place in places)
    yield "fullest rank", f"model states while it steps: {held}"
    if published and published.time_per_iteration_s:
        layout = {"tp": plan.layout.tp, "pp": plan.layout.pp, "dp": plan.layout.dp}
        other = not_comparable(
            original,
            recipe,
            tiny=tiny,
            precision=plan.precision,
            layout=layout,
            ds_name=plan.ds_name,
            ds=plan.ds,
        )
        none = f"none: the published {published.time_per_iteration_s:g} s are of something else: {other}"
        yield "TFLOPS", none if other else _tflops(plan)
    elif published and published.tflops:
        yield "TFLOPS", f"{published.tflops:g} printed, without a time; {COUNTED[published.tflops_by]}"


def _padded_size(plan: Plan) -> Iterator[tuple[str, str]]:
    """The number of parameters as Megatron-LM prints it, where it is another one, and whether it is the printed one."""
    recipe, tp = plan.recipe, plan.layout.tp
    per_rank = cost.parameters_per_rank(recipe.model, recipe.sequence_length, plan.padded_vocab, tp)
    count = tp * per_rank
    if count == cost.parameters(recipe.model, recipe.sequence_length):
        return
    printed = recipe.published.parameters if recipe.published else None
    remark = "" if printed is None else ", as printed" if printed == count else f"; {printed:,} is printed"
    if tp > 1:
        yield (
            "tensor ranks",
            f"{per_rank:,} parameters each, {count:,} in all, with duplicates and padding{remark}",
        )
    else:
        yield "padded", f"{count:,} with the padded vocabulary{remark}"


def _tflops(plan: Plan) -> str:
    """The published time in both kinds of TFLOPS, and which of them the document counts."""
    recipe, layout, published = plan.recipe, plan.layout, plan.recipe.published
    assert published and published.time_per_iteration_s
    seconds = published.time_per_iteration_s
    gpus = (recipe.hardware.gpus if recipe.hardware else None) or layout.world
    by_formula, exact = cost.tflops(
        recipe.model, recipe.sequence_length, layout.global_batch, seconds, gpus, padded_vocab=plan.padded_vocab,
        checkpointing=recipe.checkpoint_interval > 0, predictions=recipe.predictions,
    )  # fmt: skip
    peak = recipe.hardware.peak_tflops if recipe.hardware else None
    share = f" ({100 * exact / peak:.1f} % of {peak:g})" if peak else ""
    counted = (
        f"{published.tflops:g} is printed, {COUNTED[published.tflops_by]}"
        if published.tflops
        else "the row prints none"
    )
    return (
        f"{by_formula:.4g} by Jean Zay's formula with the true size, {exact:.4g} by exact count{share} in the published {seconds:g} s, per "
        f"GPU; {counted}"
    )


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


def _reasons(recipe: Recipe, original: Recipe | None, reasons: dict[str, str]) -> list[str]:
    """Those of the keys whose value is still the row's."""
    lines: list[str] = []
    for key, reason in reasons.items():
        if original is None or _value(recipe, key) != _value(original, key):
            continue
        value = _value(recipe, key)
        head = f"{key} = {value}: " if not isinstance(value, dict | list | None) else f"{key}: "
        lines += textwrap.wrap(head + reason, WIDTH, initial_indent="  ", subsequent_indent="      ")
    return lines


def _changed(recipe: Recipe, original: Recipe | None) -> str:
    """The keys that `_reasons` leaves out."""
    keys = dict.fromkeys([*recipe.inferred, *recipe.differs, *recipe.unknown])
    return ", ".join(key for key in keys if original is None or _value(recipe, key) != _value(original, key))


def _value(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key as plain data."""
    value = recipe.model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        value = (value or {}).get(part)
    return value


def launch_lines(recipe: Recipe, name: str, tiny: bool = False, settings: Sequence[str] = ()) -> list[str]:
    """Command lines: for the hardware of the row, and for a machine without it. `settings` are in `recipe` already."""
    world, per_node = processes(recipe), recipe.hardware.gpus_per_node if recipe.hardware else None
    script = f"launch/pretrain.py --ds_config {_json_file(recipe)} --recipe {shlex.quote(name)}"
    sets = "".join(f" --set {shlex.quote(setting)}" for setting in settings)
    lines = []
    if not tiny:
        if recipe.parallel.dp is None:
            lines += [
                "# on any number of GPUs of one machine that divides the batch",
                f"deepspeed {script}{sets}",
            ]
        elif per_node and world > per_node:
            lines += [f"# on {-(-world // per_node)} machines of {per_node} GPUs; hosts has a line 'name slots={per_node}' for each",
                      f"deepspeed --hostfile hosts --num_nodes {-(-world // per_node)} --num_gpus {per_node} {script}{sets}"]  # fmt: skip
        else:
            lines += [
                f"# on {world} GPU{'s' if world > 1 else ''} of one machine",
                f"deepspeed --num_gpus {world} {script}{sets}",
            ]
        try:
            shrunk = catalog.load(name, settings, tiny=True)
            published_plan(shrunk)
        except (RecipeError, ConfigError) as error:  # a setting that the smaller model cannot have
            return [
                *lines,
                "# cannot be shrunk with these settings:",
                *(f"#   {problem}" for problem in error.problems),
            ]
    else:
        shrunk = recipe
    small = processes(shrunk)
    return [
        *lines,
        "# shrunk, on any machine, with the same code path",
        f"deepspeed --num_gpus {small} {script} --tiny{sets}",
    ]


def _json_file(recipe: Recipe) -> str:
    """The DeepSpeed JSON of the recipe as an argument: one of ds_configs/ by its path, the user's own as it is written."""
    name = recipe.ds_config
    return f"ds_configs/{name}.json" if name in available() else shlex.quote(name)


def _aligned(pairs: Iterable[tuple[str, object]], width: int = 0) -> list[str]:
    pairs = list(pairs)
    width = width or max((len(name) for name, _ in pairs), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in pairs]


def _wrapped(paragraphs: Sequence[str]) -> list[str]:
    return [
        line
        for text in paragraphs
        for line in textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
    ]
