"""`benchmark.py kernels`: what a GPU does for a micro-batch of ours, a plain GPT-2 and `transformers`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ds_configs.plan import Precision
from launch.planning.prediction import hardware, workload
from launch.planning.prediction.constants import fitted_constants
from launch.planning.prediction.hardware import Node
from launch.planning.prediction.step_time import NodeRates, StageTimes
from launch.planning.resolved_plans import resolve_on_machine
from recipes import catalog
from recipes.schema import Recipe
from tools.benchmarks.results import Column, Row, add_out

EXAMPLES = """\
examples:
  python tools/benchmark.py kernels
      forward and backward pass of a micro-batch of GPT-2 of 124M and of
      BERT-large, without and with dropout
  python tools/benchmark.py kernels --recipe default/sotu --set batch.micro=8

No GPU takes part: kernels, bytes, operations and waits of the host are
counted on tensors without memory. ms: the least time, each kernel as long as
its bytes or its operations take at the GPU's published rates; plan.py says
what it predicts for the same. fp16 and bf16 are as large as each other."""

RULES = ()
NODES = ("v100-32x8", "a100-80x8", "h100-80x8")
DROPOUTS = (0.0, 0.1)
TABLE = (
    Column("", "recipe"),
    Column("dropout", "dropout"),
    Column("eager", "system"),
    Column("kernels", "kernels"),
    Column("GB", "bytes", "{:.2f}", 1e9),
    Column("TFLOP", "operations", "{:.2f}", 1e12),
    Column("waits", "waits"),
    *(Column(f"ms, {name}", name, "{:.1f}", 1e-3) for name in NODES),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which models").add_argument
    add(
        "--recipe",
        nargs="+",
        default=["openwebtext/gpt2-124m", "wikipedia/bert-336m"],
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
    add_out(parser)


def rows(args: argparse.Namespace, machine: dict[str, Any]) -> Iterator[Row]:
    """Yield the counts of each system, and what plan.py predicts. Raises ValueError."""
    # loads torch, too slow for --help
    from tools.benchmarks import kernel_counts

    nodes = [hardware.find(name) for name in NODES]
    for name in args.recipe:
        for dropout in DROPOUTS:
            own = [f"dropout.{part}={dropout}" for part in ("hidden", "attention")]
            recipe = one_micro_batch(name, [*own, *args.set])
            about = {"recipe": name, "dropout": dropout}
            for system, one_pass in kernel_counts.passes(recipe):
                counts = kernel_counts.count(one_pass)
                times = {node.name: counts.seconds(*rates(node)) for node in nodes}
                yield {**about, "system": system, **counts.numbers(), **times}
            times = {node.name: predicted(recipe, node) for node in nodes}
            yield {**about, "system": "ours, by plan.py", **times}


def one_micro_batch(name: str, settings: list[str]) -> Recipe:
    """Load a recipe as a step of one micro-batch on one rank."""
    batch = catalog.load(name, settings).batch
    size = batch.micro or batch.global_
    own = [f"batch.global={size}", f"batch.micro={size}", "batch.accumulation=1"]
    own += ["parallel={}", "activation_checkpointing=none"]
    return catalog.load(name, [*settings, *own])


def predicted(recipe: Recipe, node: Node) -> float:
    """Return the seconds of the pass by the planner."""
    work = workload.of_plan(resolve_on_machine(recipe, "zero1", 1, node.machine))
    return StageTimes(work, NodeRates(node, fitted_constants(), 1)).of_stage(0).total


def rates(node: Node) -> tuple[float, float]:
    """Return bytes and operations per second that the GPU's makers publish for half precision."""
    half: Precision = "bf16" if "bf16" in node.gpu.tflops else "fp16"
    return node.gpu.memory_gb_s * 1e9, node.gpu.tflops[half] * 1e12
