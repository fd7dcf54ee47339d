"""The subcommand `launch/plan.py largest`: the largest model for a node, by configuration."""

from __future__ import annotations

import argparse

from launch.console import arguments, terminal
from launch.console.numbers import NOTHING
from launch.planning.page import Page
from launch.planning.prediction import hardware
from launch.planning.prediction.forecast_text import error
from launch.planning.search import candidates, largest, shapes
from launch.planning.search.largest import Configuration, LargestModel, Setting
from launch.planning.search.ways import WAYS
from recipes import catalog
from recipes.families import FAMILIES
from recipes.problems import counted

ABOUT = """\
Find the largest GPT-2 or BERT that all GPUs of given nodes train together,
for each way in which DeepSpeed keeps model states, with every layer
recomputed and with none, next to the documents' rule of bytes per parameter.
Layers and hidden size grow together as in GPT-3 (Brown et al. 2020, table
2.1)."""
EXAMPLES = """\
examples:
  python launch/plan.py largest --hardware 2080ti
      on one GPU of 11 GB, next to the documents' 700 million parameters
  python launch/plan.py largest --hardware v100-32x8 --sequence-length 2048 \\
      --micro 4
      on eight of 32 GB, with longer samples and more of them
  python launch/plan.py largest --hardware a100-80x8 --nodes 4 --family bert
      a BERT, on 32 GPUs
  python launch/plan.py largest --hardware v100-32x4 --nodes 4 8 16 32 64
      a pipeline over 16 to 256 GPUs, beside the sizes that Jean Zay printed

exit codes: 0 shown, 2 refused."""
PIPELINE_HEADINGS = ["GPUs", "tensor x pipeline", "predicted", "which fills", "printed"]
PRINTED_NOTE = (
    "Printed: the largest that Jean Zay's authors tried and ran with Megatron-LM, by their labels, of which "
    "some are in 2^30; more may have fitted"
)
HEADINGS = ["model states", "nothing recomputed", "all recomputed", "which fills"]
# Categories whose names are others in a cell.
FILLS = {"working": "one layer", "fragmentation": "allocator", "context": "CUDA context"}
NOTE = "B: billion parameters; layers x hidden size. With what torch reserves, these fill the memory"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `largest` to the subparsers of launch/plan.py."""
    line = "the largest model that a node trains, by configuration"
    parser = arguments.subcommand(commands, "largest", line, ABOUT, EXAMPLES)
    parser.set_defaults(run=run)
    add = parser.add_argument
    node = f"{', '.join(hardware.names())}, this, or FILE.yaml:NODE"
    add("--hardware", required=True, metavar="NODE", help=node)
    nodes = "of them (default: 1); with several numbers, the largest model of a pipeline over each"
    add("--nodes", nargs="+", type=arguments.whole(1, 10**5), default=[1], metavar="N", help=nodes)
    add("--family", choices=shapes.RECIPES, default="gpt2", help="of models (default: %(default)s)")
    length = "tokens of a sample (default: 1024 for gpt2, 512 for bert)"
    add("--sequence-length", type=arguments.whole(16, 10**6), metavar="S", help=length)
    micro = "samples of a micro-batch (default: %(default)s)"
    add("--micro", type=arguments.whole(1, 10**4), default=1, metavar="N", help=micro)


def run(args: argparse.Namespace) -> int:
    """Print the largest models and return exit code 0. Raises ProblemsError."""
    settings = [setting_of(args, nodes) for nodes in args.nodes]
    if len(settings) > 1:
        print(pipelines(settings, terminal.columns()))
    else:
        print(page(settings[0], largest.largest(settings[0]), terminal.columns()))
    return 0


def setting_of(args: argparse.Namespace, nodes: int = 1) -> Setting:
    """Make the setting from the flags. Raises ProblemsError."""
    name = shapes.RECIPES[args.family]
    node = hardware.node_for(catalog.load(name), args.hardware)
    length = args.sequence_length or FAMILIES[args.family].length
    half = candidates.half_precision(node)
    recipe = catalog.load(name, [f"sequence_length={length}", f"precision={half}"])
    return Setting(recipe, node, nodes, args.micro)


def page(setting: Setting, found: list[LargestModel], width: int | None = None) -> Page:
    """Describe the largest models in a table, with the documents' rule below it."""
    node, recipe = setting.node, setting.recipe
    gpus = f"{counted(setting.ranks, 'GPU')} on {counted(setting.nodes, 'node')}"
    memory = f"{node.gpu.memory_bytes / 1e9:.1f} GB each"
    what = f"{recipe.model.family} in {recipe.precision}, micro-batches of {counted(setting.micro, 'sample')}"
    shown = Page(width)
    shown.facts(
        ("hardware", f"{gpus}: {node.form.title} ({node.name}), {memory}"),
        ("model", f"{what} of {recipe.sequence_length:,} tokens, dropout {recipe.dropout.hidden:g}"),
    )
    pairs = zip(found[::2], found[1::2], strict=True)  # without and with recomputation
    rows = [[_name(again), _size(kept), _size(again), _limit(setting, again)] for kept, again in pairs]
    shown.table(rows, HEADINGS, "llll")
    rooms = largest.parameters_by_rule(node).items()
    rules = ", ".join(f"{parameters / 1e9:.2f} billion at {size} bytes" for size, parameters in rooms)
    said = f"the documents' rule, memory over bytes per parameter, for one GPU: {rules}"
    if printed := largest.PRINTED_LIMITS.get(node.form.gpu):
        said += f"; they print {printed / 1e9:g} billion for this GPU as the practical upper bound"
    kept = "That leaves nothing for activations; ZeRO-0 here takes 18 bytes, as its gradients are in fp32"
    shown.text(f"{said}. {kept}", f"{NOTE}, predicted {error('memory')}")
    return shown


def pipelines(settings: list[Setting], width: int | None = None) -> Page:
    """Describe the largest models of a pipeline over each number of nodes, beside the printed ones."""
    node, recipe, rows = settings[0].node, settings[0].recipe, []
    for setting in settings:
        configuration = Configuration(WAYS[1], node.gpus, True, setting.nodes)
        found = largest.largest_of(setting, configuration)
        printed = (
            f"{row.published.size_label if row.published else ''}, {row.model.layers}x{row.model.hidden}"
            for row in largest.printed_maxima(setting)
        )
        cells = f"{setting.ranks:,}", f"{node.gpus} x {setting.nodes}", _size(found), _limit(setting, found)
        rows.append([*cells, "; ".join(printed) or NOTHING])
    what = f"{recipe.model.family} in {recipe.precision}, {recipe.sequence_length:,} tokens"
    batch = f"{largest.CHUNKS} micro-batches of {counted(settings[0].micro, 'sample')}"
    shown = Page(width)
    shown.facts(
        ("hardware", f"nodes of {counted(node.gpus, 'GPU')}: {node.form.title} ({node.name})"),
        ("model", f"{what}, {batch}, every layer recomputed; one replica over all GPUs"),
    )
    shown.table(rows, PIPELINE_HEADINGS, "rllll")
    shown.text(NOTE, PRINTED_NOTE)
    return shown


def _name(model: LargestModel) -> str:
    way, tp, _, pp = model.configuration
    return way.name + f", tensor {tp}" * (tp > 1) + f", pipeline {pp}" * (pp > 1)


def _size(model: LargestModel) -> str:
    if model.verdict != "fits":
        return "none fits"
    return f"{model.parameters / 1e9:.2f} B, {model.layers}x{model.hidden}"


def _limit(setting: Setting, model: LargestModel) -> str:
    """Name the limit: host memory, or the largest category on the GPU."""
    if model.on_host:
        return f"host memory {model.host / setting.node.form.host.memory_gb / 1e9:.0%}"
    name, size = max(model.memory.on_gpu.items(), key=lambda part: part[1])
    return f"GPU: {FILLS.get(name, name)} {size / model.memory.total:.0%}"
