"""`benchmark.py kernels`: what a GPU does for a micro-batch of ours, a plain GPT-2 and `transformers`."""

from __future__ import annotations

import argparse
from typing import Any

from ds_configs.plan import Precision
from launch.console.text_table import table
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.constants import fitted_constants
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.step_time import NodeRates, StageTimes
from launch.planning.resolved_plans import resolve_on_machine
from recipes import catalog
from recipes.schema import Recipe

EXAMPLES = """\
examples:
  python tools/benchmark.py kernels
      forward and backward pass of a micro-batch of GPT-2 of 124M and of
      BERT-large, eager and compiled, without and with dropout
  python tools/benchmark.py kernels --recipe default/sotu --set batch.micro=8

No GPU takes part: kernels, bytes, operations and waits of the host are
counted on tensors without memory. ms: the least time, each kernel as long as
its bytes or its operations take at the GPU's published rates; plan.py says
what it predicts for the same. fp16 and bf16 are as large as each other."""

RULES = ()
RECIPES = ("openwebtext/gpt2-124m", "wikipedia/bert-336m")
NODES = ("v100-32x8", "a100-80x8", "h100-80x8")
DROPOUTS = (0.0, 0.1)
PARTS = ("hidden", "attention")
COLUMNS = (
    "recipe",
    "dropout",
    "system",
    "form",
    "kernels",
    "bytes",
    "operations",
    "waits",
    *NODES,
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which models").add_argument
    add(
        "--recipe",
        nargs="+",
        default=list(RECIPES),
        metavar="TABLE/ROW",
        help="default: %(default)s",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a field of the recipes",
    )
    add(
        "--eager",
        action="store_true",
        help="leave out the compiled passes, which take most of the time",
    )


def measure(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Print a table per recipe and dropout; return all numbers. Raises ValueError."""
    # loads torch's compiler, too slow for --help
    from tools.benchmarks import kernel_counts

    forms = {"eager": kernel_counts.count_eager}
    if not args.eager:
        forms["compiled"] = kernel_counts.count_compiled
    nodes = [hardware.find(name) for name in NODES]
    gpus = (f"ms, {node.gpu.title.split()[1]}" for node in nodes)
    headings = ("", "kernels", "GB", "TFLOP", "waits", *gpus)
    found = []
    for name in args.recipe:
        for dropout in DROPOUTS:
            recipe = one_micro_batch(
                name, [f"dropout.{part}={dropout}" for part in PARTS] + args.set
            )
            rows: list[tuple[str, ...]] = []
            for form, count in forms.items():
                for system, one_pass in kernel_counts.passes(recipe):
                    counts = count(one_pass)
                    seconds = [counts.seconds(*rates(node)) for node in nodes]
                    numbers = (
                        len(counts.kernels),
                        counts.moved,
                        counts.operations,
                        len(counts.waits),
                    )
                    found.append([name, dropout, system, form, *numbers, *seconds])
                    sizes = (
                        f"{counts.moved / 1e9:.2f}",
                        f"{counts.operations / 1e12:.2f}",
                    )
                    shown = (
                        str(numbers[0]),
                        *sizes,
                        str(numbers[3]),
                        *map(_ms, seconds),
                    )
                    rows.append((f"{system}, {form}", *shown))
            rows.append(
                (
                    "ours, plan.py",
                    "",
                    "",
                    "",
                    "",
                    *(_ms(predicted(recipe, node)) for node in nodes),
                )
            )
            tokens = recipe.batch.global_ * recipe.sequence_length
            print(f"\n{name}, dropout {dropout:g}, micro-batch of {tokens:,} tokens")
            print(table(rows, headings, "lrrrrrrr"), flush=True)
    return {"columns": COLUMNS, "counts": found}


def one_micro_batch(name: str, settings: list[str]) -> Recipe:
    """Load a recipe as a step of one micro-batch on one rank."""
    row = catalog.load(name, settings)
    own = [
        f"batch.global={row.batch.micro or row.batch.global_}",
        "batch.accumulation=1",
    ]
    own += [f"batch.micro={row.batch.micro or row.batch.global_}"]
    return catalog.load(
        name, [*settings, *own, "parallel={}", "activation_checkpointing=none"]
    )


def predicted(recipe: Recipe, node: Node) -> float:
    """Return the seconds of the pass by the planner."""
    work = workload.of_plan(resolve_on_machine(recipe, "zero1", 1, node.machine))
    return StageTimes(work, NodeRates(node, fitted_constants(), 1)).of_stage(0).total


def rates(node: Node) -> tuple[float, float]:
    """Return bytes and operations per second that the GPU's makers publish for half precision."""
    half: Precision = "bf16" if "bf16" in node.gpu.tflops else "fp16"
    return node.gpu.memory_gb_s * 1e9, node.gpu.tflops[half] * 1e12


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"
