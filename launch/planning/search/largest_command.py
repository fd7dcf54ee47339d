"""The subcommand `launch/plan.py largest`: the largest model for given GPUs, by configuration."""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

from ds_configs.plan import Plan
from ds_configs.resolver import resolve
from launch.console import arguments, terminal
from launch.console.numbers import NOTHING
from launch.planning.page import Page
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.forecast import Forecast, forecast, largest_number
from launch.planning.prediction.forecast_text import error
from launch.planning.search import candidates, shapes
from launch.planning.search.candidates import Degrees, Question
from launch.planning.search.ways import WAYS, Way
from modeling import cost
from recipes import catalog
from recipes.families import FAMILIES
from recipes.problems import counted
from recipes.schema import Recipe
from recipes.tables import FOLDER, read_table

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
NOTE = "B: billion parameters; layers x hidden size. With what torch reserves, these fill the memory"
STEP = 128  # of the hidden size, times tensor ranks: whole heads on each
WIDE = 2048  # hidden size from which heads are of 128, as in GPT-3; below 64
MOST_HIDDEN = 2**17
MOST_LAYERS = 10_000
# Micro-batches of a pipeline's step, as in Jean Zay's tables of maximal sizes.
CHUNKS = 4
# Categories whose names are others in a cell.
FILLS = {"working": "one layer", "fragmentation": "allocator", "context": "CUDA context"}
MAXIMAL_SIZES = ("jeanzay_megatron_max_size_16gb", "jeanzay_megatron_max_size_32gb")
# "Optimizing Large-Scale GPT Models Pretraining" (SberDevices): "practical upper bound of GPT model size per
# GPU", and its bytes per parameter: fp32, mixed precision as it counts that, and with gradients.
PRINTED_LIMITS = {"v100-32": 2.0e9, "v100-32-pcie": 2.0e9, "2080ti": 0.7e9}
BYTES_PER_PARAMETER = (12, 14, 16)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `largest` to the subparsers of launch/plan.py."""
    line = "the largest model that a node trains, by configuration"
    parser = arguments.subcommand(commands, "largest", line, ABOUT, EXAMPLES)
    parser.set_defaults(run=run)
    add = parser.add_argument
    node = f"{', '.join(hardware.names())}, or FILE.yaml:NODE"
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
    questions = [question_of(args, nodes) for nodes in args.nodes]
    if len(questions) > 1:
        print(pipelines(questions, terminal.columns()))
    else:
        print(page(questions[0], largest(questions[0]), terminal.columns()))
    return 0


def question_of(args: argparse.Namespace, nodes: int = 1) -> Question:
    """Make the question from the flags; its recipe's shape is replaced. Raises ProblemsError."""
    name = shapes.RECIPES[args.family]
    node = hardware.node_for(catalog.load(name), args.hardware)
    length = args.sequence_length or FAMILIES[args.family].length
    half = candidates.half_precision(node)
    recipe = catalog.load(name, [f"sequence_length={length}", f"precision={half}"])
    batch = recipe.batch.model_copy(update={"micro": args.micro})
    return Question(recipe.model_copy(update={"batch": batch}), node, nodes)


def page(question: Question, found: list[LargestModel], width: int | None = None) -> Page:
    """Describe the largest models in a table, with the documents' rule below it."""
    node, recipe = question.node, question.recipe
    gpus = f"{counted(question.ranks, 'GPU')} on {counted(question.nodes, 'node')}"
    memory = f"{node.gpu.memory_bytes / 1e9:.1f} GB each"
    micro = counted(recipe.batch.micro or 1, "sample")
    what = f"{recipe.model.family} in {recipe.precision}, micro-batches of {micro}"
    shown = Page(width)
    shown.facts(
        ("hardware", f"{gpus}: {node.title} ({node.name}), {memory}"),
        ("model", f"{what} of {recipe.sequence_length:,} tokens, dropout {recipe.dropout.hidden:g}"),
    )
    pairs = zip(found[::2], found[1::2], strict=True)  # without and with recomputation
    rows = [[again.configuration, kept.size, again.size, again.limit] for kept, again in pairs]
    shown.table(rows, HEADINGS, "llll")
    rooms = ((size, node.gpu.memory_bytes / size / 1e9) for size in BYTES_PER_PARAMETER)
    rules = ", ".join(f"{billions:.2f} billion at {size} bytes" for size, billions in rooms)
    said = f"the documents' rule, memory over bytes per parameter, for one GPU: {rules}"
    if printed := PRINTED_LIMITS.get(node.gpu.name):
        said += f"; they print {printed / 1e9:g} billion for this GPU as the practical upper bound"
    kept = "That leaves nothing for activations; ZeRO-0 here takes 18 bytes, as its gradients are in fp32"
    shown.text(f"{said}. {kept}", f"{NOTE}, predicted {error('memory')}")
    return shown


def pipelines(questions: list[Question], width: int | None = None) -> Page:
    """Describe the largest models of a pipeline over each number of nodes, beside the printed ones."""
    node, recipe, rows = questions[0].node, questions[0].recipe, []
    for question in questions:
        configuration = Configuration(WAYS[1], node.gpus, True, question.nodes)
        found = largest_of(question, configuration)
        printed = (
            f"{row.published.size_label if row.published else ''}, {row.model.layers}x{row.model.hidden}"
            for row in printed_maxima(question)
        )
        cells = f"{question.ranks:,}", f"{node.gpus} x {question.nodes}", found.size, found.limit
        rows.append([*cells, "; ".join(printed) or NOTHING])
    what = f"{recipe.model.family} in {recipe.precision}, {recipe.sequence_length:,} tokens"
    batch = f"{CHUNKS} micro-batches of {counted(recipe.batch.micro or 1, 'sample')}"
    shown = Page(width)
    shown.facts(
        ("hardware", f"nodes of {counted(node.gpus, 'GPU')}: {node.title} ({node.name})"),
        ("model", f"{what}, {batch}, every layer recomputed; one replica over all GPUs"),
    )
    shown.table(rows, PIPELINE_HEADINGS, "rllll")
    shown.text(NOTE, PRINTED_NOTE)
    return shown


class Configuration(NamedTuple):
    """A way of keeping model states over `tp` tensor ranks and `pp` stages; `recomputed`: every layer."""

    way: Way
    tp: int
    recomputed: bool
    pp: int = 1

    def __str__(self) -> str:
        return self.way.name + f", tensor {self.tp}" * (self.tp > 1) + f", pipeline {self.pp}" * (self.pp > 1)


class LargestModel(NamedTuple):
    """The largest model of a configuration, with its forecast; the smallest one if none fits."""

    configuration: Configuration
    forecast: Forecast

    @property
    def parameters(self) -> int:
        work = self.forecast.work
        return cost.parameters(work.model, work.positions)

    @property
    def host_share(self) -> float:
        """Share of the host's memory that is taken."""
        return self.forecast.host / (self.forecast.node.host.memory_gb * 1e9)

    @property
    def size(self) -> str:
        model = self.forecast.work.model
        fits = self.forecast.verdict == "fits"
        return f"{self.parameters / 1e9:.2f} B, {model.layers}x{model.hidden}" if fits else "none fits"

    @property
    def limit(self) -> str:
        """Name the limit: host memory, or the largest category on the GPU."""
        rank = self.forecast.fullest_rank
        if self.host_share > rank.total / self.forecast.node.gpu.memory_bytes:
            return f"host memory {self.host_share:.0%}"
        name, size = max(rank.on_gpu.items(), key=lambda part: part[1])
        return f"GPU: {FILLS.get(name, name)} {size / rank.total:.0%}"


def largest(question: Question) -> list[LargestModel]:
    """Find the largest model of each way, of ZeRO-1 over a node and of a stage on each node.

    Each without and with recomputation.
    """
    degrees = [(way, 1, 1) for way in WAYS if way.offload is None]
    if question.node.gpus > 1:
        degrees.append((WAYS[1], question.node.gpus, 1))
    if question.nodes > 1:
        degrees.append((WAYS[1], question.node.gpus, question.nodes))
    return [
        largest_of(question, Configuration(way, tp, recomputed, pp))
        for way, tp, pp in degrees
        for recomputed in (False, True)
    ]


def largest_of(question: Question, configuration: Configuration) -> LargestModel:
    """Find the largest hidden size with a usual number of layers, then the most layers, equal stages."""
    step, pp = STEP * configuration.tp, configuration.pp

    def shaped(layers: int, hidden: int) -> Forecast:
        plan = plan_of(question, configuration, layers, hidden)
        return forecast(workload.of_plan(plan), question.node)

    def fits(layers: int, hidden: int) -> bool:
        return shaped(layers, hidden).verdict == "fits"

    def usual(hidden: int) -> int:
        return math.ceil(shapes.usual_layers(hidden) / pp) * pp

    units = largest_number(lambda unit: fits(usual(unit * step), unit * step), MOST_HIDDEN // step)
    hidden = max(1, units) * step
    layers = pp * max(1, largest_number(lambda each: fits(each * pp, hidden), MOST_LAYERS // pp))
    return LargestModel(configuration, shaped(layers, hidden))


def plan_of(question: Question, configuration: Configuration, layers: int, hidden: int) -> Plan:
    """Resolve a model of that shape. Raises ConfigError."""
    recipe, (way, tp, recomputed, pp) = question.recipe, configuration
    heads = hidden // (128 if hidden >= WIDE and hidden % (128 * tp) == 0 else 64)
    at, chunks = Degrees(tp, pp, question.ranks // (tp * pp)), CHUNKS if pp > 1 else 1
    model = recipe.model.model_copy(update={"layers": layers, "hidden": hidden, "heads": heads})
    changed = {"model": model, "activation_checkpointing": "full" if recomputed else "none"}
    shaped = candidates.laid_out(recipe, at, recipe.batch.micro or 1, chunks, **changed)
    return resolve(shaped, way.file, question.ranks, question.node.machine)


def printed_maxima(question: Question) -> list[Recipe]:
    """Return the documents' largest models on as many such nodes, of one replica over all of them."""
    rows = [f"{table}/{row}" for table in MAXIMAL_SIZES for row in read_table(FOLDER / f"{table}.yaml").rows]
    found = []
    for recipe in map(catalog.load, rows):
        own, replica = recipe.hardware, math.prod(recipe.parallel.model_parallel)
        if own and own.node == question.node.name and own.gpus == replica == question.ranks:
            found.append(recipe)
    return found
