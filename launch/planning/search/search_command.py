"""The subcommand `launch/plan.py search`: the fastest layout of a recipe on given nodes."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from data.durable_files import write_atomically
from ds_configs.findings import find, read
from launch.console import arguments, launch_lines, new_output, terminal
from launch.console.text_table import Page
from launch.planning.prediction import hardware
from launch.planning.prediction.workload import Workload
from launch.planning.search import (
    candidates,
    largest,
    layout_search,
    search_text,
    shapes,
    ways,
)
from launch.planning.search.candidates import SearchQuestion
from launch.planning.search.layout_search import Candidate
from launch.planning.search.ways import JSON_NAME
from recipes import catalog
from recipes.files import path_of
from recipes.key_paths import key_of
from recipes.problems import Problem, ProblemsError
from recipes.schema import Recipe

ABOUT = """\
Go through tensor x pipeline x data parallelism, ZeRO stage, offload,
micro-batch and recomputation of a recipe on all GPUs of given nodes; tensor
parallelism stays inside a node unless --set parallel.tp asks for more. Print
the fastest layouts that fit, with memory and time. With --out, write the
first one as a DeepSpeed JSON. With --largest, grow the model instead until
nothing more fits."""
EXAMPLES = """\
examples:
  python launch/plan.py search --model 13b --hardware v100-32x8 --nodes 8 \\
      --out jobs/13b
      a GPT of 13 billion parameters on 64 V100; writes
      jobs/13b/ds_config.json and prints the launch line
  python launch/plan.py search --recipe openwebtext/gpt2-124m \\
      --hardware v100-32-pciex8 --set precision=fp16
      a recipe with its own batch, on one node
  python launch/plan.py search --model 8.3b --hardware dgx2 --nodes 32
      a size of the published tables, here of the Megatron-LM paper
  python launch/plan.py search --model 175b --hardware a100-80x8 --nodes 128 \\
      --set parallel.tp=8
      a degree that stays; so do parallel.pp, parallel.dp, batch.micro,
      batch.accumulation and activation_checkpointing
  python launch/plan.py search --model 1.3b --hardware a100-40x8 \\
      --ds_config my.json --out jobs/1.3b
      your own JSON, with the winner's stage, offload, degrees and batch in it
  python launch/plan.py search --largest --hardware v100-32x4 --nodes 16
      the largest model that 64 GPUs train, by the place of model states,
      next to the sizes that were printed of them; so for a BERT with
      --recipe wikipedia/bert-336m

exit codes: 0 shown and written, 1 nothing fits, 2 refused."""
# What a search decides, as overrides that leave a recipe's own undecided.
_UNDECIDED = (
    "parallel.tp",
    "parallel.pp",
    "parallel.dp",
    "batch.micro",
    "batch.accumulation",
)
OPEN = tuple(f"{key}=null" for key in _UNDECIDED)

RECOMPUTATION = "activation_checkpointing"
GROWN = "--set model.layers, --set model.hidden, --set model.heads, --set model"

RULES = (
    ("--global-batch", "--set batch.global", "both decide it"),
    (
        "--largest",
        "--model, --out, --top",
        "it grows a model, in one layout of each kind, and writes nothing",
    ),
    ("--largest", GROWN, "it is what grows"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `search` to the subparsers of launch/plan.py."""
    line = "the fastest layout on given nodes, as a ds_config and flags"
    parser = arguments.subcommand(commands, "search", line, ABOUT, EXAMPLES, RULES)
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument_group("which model, on what").add_argument
    own = ", ".join(shapes.RECIPES.values())
    sizes = ", ".join(shapes.NAMES)
    model = f"a model of that size in place of the recipe's (default recipe: {own}): GPT-3's {sizes}, or one "
    model += "of the published tables, e.g. 8.3b or 61b"
    add("--model", metavar="SIZE", help=model)
    add(
        "--largest",
        action="store_true",
        help="the largest model of the recipe's kind that fits, by model states",
    )
    batch = "samples per optimizer step (default: the recipe's)"
    add("--global-batch", type=arguments.whole(1, 10**7), metavar="N", help=batch)
    base = "DeepSpeed JSON whose stage and offload are replaced (default: those of ds_configs/)"
    add("--ds_config", metavar="FILE", help=base)
    add(
        "--hardware",
        metavar="NODE",
        help=f"{hardware.ways_to_name()} (default: the recipe's)",
    )
    add(
        "--nodes",
        type=arguments.whole(1, 10**5),
        default=1,
        metavar="N",
        help="of them (default: 1)",
    )
    add = parser.add_argument_group("what comes out").add_argument
    top = "layouts that are shown (default: %(default)s)"
    add("--top", type=arguments.whole(1, 1000), default=8, metavar="N", help=top)
    add("--out", metavar="DIR", help=f"write {JSON_NAME} there; nothing is overwritten")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the layouts, write the first, return exit code 0; 1: nothing fits. Raises ProblemsError."""
    out = path_of(args.out, "--out") if args.out else None
    if out and arguments.directory("--out", out).exists():  # refused before the search
        new_output.new_file("--out", out / JSON_NAME)
    flags, question = question_of(args)
    if args.largest:
        found = largest.largest(question)
        print(search_text.largest_page(question, found, terminal.columns()))
        return 0 if any(each.best for each in found) else 1
    answer = layout_search.search(question)
    name = catalog.full_name(flags.name) + "-tiny" * flags.tiny
    name += f" --model {args.model}" if args.model else ""
    page = search_text.page(answer, name, args.top, terminal.columns())
    if answer.winner:
        launched(page, flags, question, answer.winner, out)
    print(page)
    return 0 if answer.winner else 1


def question_of(args: argparse.Namespace) -> tuple[RecipeFlags, SearchQuestion]:
    """Make the question from the flags. Raises ProblemsError."""
    size = args.model and shapes.size(args.model)
    name = args.recipe
    if (size or args.largest) and name == catalog.DEFAULT_RECIPE:
        name = shapes.RECIPES[size.family if size else "gpt2"]
    own = catalog.load(name)
    if size and own.model.family != size.family:
        came = f"--model {args.model} with --recipe {name}"
        rule = f"it is a {size.family}, and the recipe's model is a {own.model.family}"
        raise ProblemsError([Problem("--model", came, rule, "leave --recipe out")])
    node = hardware.node_for(own, args.hardware)
    half = candidates.half_precision(node)
    shape = size.settings(half) if size else []
    if args.largest:
        shape = [f"precision={half}", "batch.micro=1"]
    batch = [f"batch.global={args.global_batch}"] if args.global_batch else []
    overrides = {key_of(text): text for text in (*shape, *args.set, *batch)}
    flags = RecipeFlags(name, overrides, args.tiny, args.steps)
    recipe = flags.load([*OPEN, *overrides.values()])
    base = read(find(args.ds_config)) if args.ds_config else None
    found = SearchQuestion(recipe, node, args.nodes, base)
    if RECOMPUTATION in overrides:
        found = replace(found, recomputations=(recipe.activation_checkpointing,))
    return flags, found


class RecipeFlags(NamedTuple):
    """The recipe as stated by the flags; `overrides`: of `--model`, `--set` and `--global-batch`."""

    name: str
    overrides: dict[str, str]  # by key, as key=value; the last of each
    tiny: bool
    steps: int | None

    def load(self, overrides: Iterable[str]) -> Recipe:
        """Load the recipe with these overrides instead of its own."""
        return catalog.load(self.name, [*overrides], tiny=self.tiny, steps=self.steps)


def launched(
    page: Page,
    flags: RecipeFlags,
    question: SearchQuestion,
    layout: Candidate,
    out: Path | None,
) -> None:
    """Add the launch of a layout to the page, and write its JSON into `out`. Raises ConfigError."""
    settings = settings_of(flags, layout.work)
    file = layout.way.file
    document = ways.config(layout.way, question.base, layout.work.layout)
    plan = ways.resolved(
        document, flags.load(settings), question.ranks, question.node.machine
    )
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / JSON_NAME, ways.json_text(document))
        file = str(out / JSON_NAME)
    words = launch_lines.arguments(
        flags.name, file, settings, tiny=flags.tiny, steps=flags.steps
    )
    launcher = launch_lines.deepspeed(question.nodes, question.node.gpus)
    line = f"{launcher} {launch_lines.SCRIPT} {launch_lines.quoted(words)}"
    below = [f"wrote {file}"] if out else []
    if not out and (question.base or layout.way.offload):  # no file holds its JSON
        line = " ".join(f"--set {text}" for text in settings)
        below = [f"--out DIR writes its {JSON_NAME}, and shows the line"]
    page.commands(
        line,
        above=[f"to launch layout 1: {search_text.layout_words(layout)}"],
        below=below,
    )
    page.notes(plan.notices)


def settings_of(flags: RecipeFlags, work: Workload) -> list[str]:
    """Return the overrides of the recipe for a predicted step."""
    recomputation: object = {0: "none", 1: "full"}.get(work.recomputed, work.recomputed)
    decided = {
        "parallel.tp": work.layout.tp,
        "parallel.pp": work.layout.pp,
        "parallel.dp": work.layout.dp,
        "batch.micro": work.layout.micro,
        "batch.accumulation": work.layout.accumulation,
        "parallel.sequence": work.sequence_parallel,
        RECOMPUTATION: recomputation,
    }
    sets = {key: f"{key}={str(value).lower()}" for key, value in decided.items()}
    return list({**flags.overrides, **sets}.values())
