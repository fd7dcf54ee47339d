"""The subcommand `launch/plan.py search`: the fastest layout of a recipe on given nodes."""

from __future__ import annotations

import argparse

from launch.console import arguments, launch_lines, terminal
from launch.planning.memory_fit import UNCOUNTED
from launch.planning.prediction import hardware
from launch.planning.search import candidates, largest, search_text, shapes
from launch.planning.search.candidates import WAYS, Candidate, SearchQuestion
from recipes import catalog
from recipes.key_paths import key_of
from recipes.problems import ProblemsError

ABOUT = """\
Go through tensor x pipeline x data parallelism, ZeRO stage, offload,
micro-batch and recomputation of a recipe on all GPUs of given nodes; tensor
parallelism stays inside a node unless --set parallel.tp asks for more. Print
the fastest layouts that fit, with memory and time, and the launch line of
the first. With --largest, grow the model instead until nothing more fits."""
EXAMPLES = """\
examples:
  python launch/plan.py search --model 13b --hardware v100-32x8 --nodes 8
      a GPT of 13 billion parameters on 64 V100
  python launch/plan.py search --recipe openwebtext/gpt2-124m \\
      --hardware v100-32-pciex8 --set precision=fp16
      a recipe with its own batch, on one node
  python launch/plan.py search --recipe megatron_paper_table1/8.3b-mp --nodes 32
      a model of the published tables on the nodes of its row
  python launch/plan.py search --model 175b --hardware a100-80x8 --nodes 128 \\
      --set parallel.tp=8
      a degree that stays; so do parallel.pp, parallel.dp, batch.micro,
      batch.accumulation and activation_checkpointing
  python launch/plan.py search --largest --hardware v100-32x4 --nodes 16
      the largest model that 64 GPUs train, by the place of model states,
      next to the sizes that were printed of them; so for a BERT with
      --recipe wikipedia/bert-336m

exit codes: 0 shown, 1 nothing fits, 2 refused."""
# What a search decides, as overrides that leave a recipe's own undecided.
OPEN = (
    "parallel.tp=null",
    "parallel.pp=null",
    "parallel.dp=null",
    "batch.micro=null",
    "batch.accumulation=null",
)
RECOMPUTATION = "activation_checkpointing"
GROWN = "--set model.layers, --set model.hidden, --set model.heads, --set model"
RULES = (
    ("--model", "--recipe", "both say which model"),
    ("--largest", f"--model, --top, {GROWN}", "it grows a model, in one layout"),
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `search` to the subparsers of launch/plan.py."""
    line = "the fastest layout on given nodes, as a ds_config and flags"
    parser = arguments.subcommand(commands, "search", line, ABOUT, EXAMPLES, RULES)
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument_group("which model, on what").add_argument
    add(
        "--model",
        metavar="SIZE",
        type=str.lower,
        choices=shapes.SIZES,
        help=f"a GPT of this size of GPT-3's, trained as {shapes.RECIPE}: %(choices)s",
    )
    add(
        "--largest",
        action="store_true",
        help="the largest model of the recipe's kind that fits, by model states",
    )
    add(
        "--hardware",
        metavar="NODE",
        help=f"{hardware.ways_to_name()} (default: the recipe's)",
    )
    count = arguments.whole(1, 10**5)
    add("--nodes", type=count, default=1, metavar="N", help="of them (default: 1)")
    add(
        "--top",
        type=arguments.whole(1, 1000),
        default=8,
        metavar="N",
        help="layouts that are shown (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the layouts and return exit code 0; 1: nothing fits. Raises ProblemsError."""
    question = question_of(args)
    if args.largest:
        models = largest.largest(question)
        print(search_text.largest_page(question, models, terminal.columns()))
        return 0 if any(each.best for each in models) else 1
    name = catalog.find(question.name).name + "-tiny" * args.tiny
    name += f" --model {args.model}" if args.model else ""
    ranking = candidates.search(question)
    page = search_text.page(question, ranking, name, args.top, terminal.columns())
    best = ranking[0]
    if best.fits:
        line = launch_line(question, best, args)
        page.commands(line, above=[f"to launch layout 1: {search_text.words(best)}"])
        page.notes(best.plan.notices)
    print(page)
    return 0 if best.fits else 1


def question_of(args: argparse.Namespace) -> SearchQuestion:
    """Make the question from the flags. Raises ProblemsError."""
    name = args.recipe
    if args.model or (args.largest and name == catalog.DEFAULT_RECIPE):
        name = shapes.RECIPE
    named = catalog.find(name)
    node = hardware.node_for(named.recipe, args.hardware)
    half = next((kind for kind in ("bf16", "fp16") if kind in node.gpu.tflops), "fp32")
    shape = shapes.SIZES[args.model].settings(half) if args.model else []
    recomputations: tuple[str | int, ...] = ("none", "full")
    if args.largest:
        shape = [f"precision={half}", "batch.micro=1"]
        # every layer, which leaves the most room
        recomputations = ("full",)
    settings = {key_of(text): text for text in (*shape, *args.set)}
    recipe = named.changed([*OPEN, *settings.values()], args.tiny, args.steps)
    if recipe.model.config:
        raise ProblemsError([UNCOUNTED])
    if RECOMPUTATION in settings:
        recomputations = (recipe.activation_checkpointing,)
    return SearchQuestion(name, settings, recipe, node, args.nodes, recomputations)


def launch_line(
    question: SearchQuestion, best: Candidate, args: argparse.Namespace
) -> str:
    """Return the command that trains under a layout."""
    recipe = best.plan.recipe
    layout = best.plan.layout
    decided = {
        "parallel.tp": layout.tp,
        "parallel.pp": layout.pp,
        "parallel.dp": layout.dp,
        "batch.micro": layout.micro,
        "batch.accumulation": layout.accumulation,
        "parallel.sequence": str(recipe.parallel.sequence).lower(),
        RECOMPUTATION: recipe.activation_checkpointing,
    }
    sets = {key: f"{key}={value}" for key, value in decided.items()}
    settings = [*(question.settings | sets).values()]
    words = launch_lines.arguments(
        question.name, WAYS[best.way], settings, tiny=args.tiny, steps=args.steps
    )
    launcher = launch_lines.deepspeed(question.nodes, question.node.gpus)
    return f"{launcher} {launch_lines.SCRIPT} {launch_lines.quoted(words)}"
