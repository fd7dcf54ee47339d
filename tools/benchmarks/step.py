"""`benchmark.py step`: the training step of several systems in turns, so that noise hits all alike."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil

from ds_configs.resolver import resolve
from launch.console import arguments, terminal
from launch.machine import description
from recipes.problems import ProblemsError
from tools.benchmarks.results import Column, Row, add_out, table
from tools.benchmarks.specification import Specification
from tools.benchmarks.worker import Worker, WorkerFailed

EXAMPLES = """\
examples:
  python tools/benchmark.py step
      GPT-2 of 14M parameters under zero1; some three minutes on two cores,
      most of it starting and compiling
  python tools/benchmark.py step --ds_config zero1 zero3_offload \\
      --systems ours transformers
      two configurations; each system in a process of its own, in turns of
      some steps each
  python tools/benchmark.py step --recipe bert/sotu \\
      --set sequence_length=512 --set batch.global=8
      a BERT, whose padding counts neither as tokens nor as operations
  python tools/benchmark.py step --variants compiled --profile runs/traces \\
      --out step.json
      also traces for chrome://tracing, and the operations that take longest

systems:
  ours          our engine as training runs it: the loader's batches, the
                step, what ranks tell each other
  transformers  its model under the same resolved DeepSpeed JSON, in a loop
                without anything else
  bare          our model in a PyTorch loop with fp32 masters and torch's
                fused AdamW: what DeepSpeed and our loop cost
  nano          a plain GPT-2 in the manner of nanoGPT; weights in bf16 on a
                CPU, autocast on a GPU
All read the same batches. Ours and bare keep freed memory, as
pretrain.py does on a CPU; the others run as torch starts them. The
median step counts. Shares are of the rate of a large square product,
measured between the systems' turns; operations are counted exactly,
those of recomputation not. Memory is of the process, or of the GPU.
others: what other programs had of the cores in the median turn."""

RULES = ()
VARIANTS = ("eager", "compiled")
# Name -> (title, the variants that are measured by default).
SYSTEMS: dict[str, tuple[str, Sequence[str]]] = {
    "ours": ("ours", ("compiled", "eager")),
    "bare": ("bare loop", ("compiled",)),
    "nano": ("as nanoGPT", ("compiled",)),
    "transformers": ("transformers", ("eager",)),
}
UNDER_DEEPSPEED = ("ours", "transformers")  # measured under every configuration
RATE = "rate"
PROFILED = 3  # steps
TABLE = (
    Column("", "name"),
    Column("s/step", "seconds", "{:.4f}"),
    Column("fastest", "fastest", "{:.4f}"),
    Column("tokens/s", "tokens_per_s", "{:,.0f}"),
    Column("TFLOP/s", "tflops", "{:.3f}"),
    Column("of square", "share", "{:.1%}"),
    Column("peak GB", "peak_bytes", "{:.2f}", 1e9),
    Column("time", "times", "{:.2f}x"),
    Column("others", "others", "{:.0%}"),
    Column("s until built", "start_s", "{:.1f}"),
    Column("warm", "warm_up_s", "{:.1f}"),
    Column("graphs", "graphs"),
)
PROFILE = (
    Column("operation, by its own time", "operation"),
    Column("ms of a step", "seconds", "{:.1f}", 1e-3),
    Column("calls", "calls", "{:g}"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    arguments.add_recipe_arguments(parser, ends=False)
    add = parser.add_argument_group("what is measured").add_argument
    add(
        "--ds_config",
        nargs="+",
        default=["zero1"],
        metavar="FILE",
        help="DeepSpeed JSONs, as paths or bare names in ds_configs/ (default: zero1)",
    )
    add(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=list(SYSTEMS),
        help="default: all",
    )
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        help="default: both of ours, compiled bare and nano, eager transformers",
    )
    add(
        "--profile",
        metavar="DIR",
        help="write torch's traces there, and show what takes longest",
    )
    add = parser.add_argument_group("how long").add_argument
    for flag, default, what in (
        ("--blocks", 5, "turns of each system"),
        ("--steps", 6, "of a turn"),
        ("--warm_up", 4, "steps before the first turn"),
    ):
        add(
            flag,
            type=arguments.whole(most=10**6),
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    add(
        "--apart",
        action="store_true",
        help="one system after the other, not in turns: for models of which memory holds one",
    )
    add_out(parser)


def specifications(args: argparse.Namespace) -> list[Specification]:
    """Return what is measured: the matrix rate, then the requested systems, ours first."""
    first, *_ = args.ds_config
    rate = Specification(
        "matrix rate", RATE, args.recipe, tuple(args.set), args.tiny, first
    )
    specs = [rate]
    family = rate.load().model.family
    for system, (title, usual) in SYSTEMS.items():
        if system not in args.systems:
            continue
        if system == "nano" and family == "bert":
            terminal.say("nano: not measured: there is no plain loop for BERT")
            continue
        several = system in UNDER_DEEPSPEED
        configs = args.ds_config if several else [first]
        for config, variant in product(configs, args.variants or usual):
            parts = (title, config, variant) if several else (title, variant)
            spec = replace(
                rate,
                name=", ".join(parts),
                system=system,
                ds_config=config,
                compiled=variant == "compiled",
            )
            specs.append(spec)
    return specs


def model_line(specs: Sequence[Specification]) -> str:
    """Describe the model and its batch in one line. Raises ValueError if a configuration refuses it."""
    machine = description.detect_machine()
    for spec in specs:
        recipe = spec.load()
        if recipe.model.implementation == "transformers":
            rule = "it runs transformers' modules, which are a system of their own here"
            fix = "--set model.implementation=megarecipes"
            raise ProblemsError.of("--recipe", f"--recipe {spec.recipe}", rule, fix)
        plan = resolve(recipe, spec.ds_config, 1, machine)
    model = recipe.model
    layout = plan.layout
    return (
        f"{spec.recipe}: {model.family}, {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads, vocabulary {model.vocab_size}, sequence {recipe.sequence_length}, "
        f"{plan.precision}; micro-batch {layout.micro} x {layout.accumulation}, "
        f"dropout {recipe.dropout.hidden:g}"
    )


def rows(args: argparse.Namespace, machine: dict[str, Any]) -> Iterator[Row]:
    """Measure the systems in turns, and yield their rows. Raises ValueError."""
    specs = specifications(args)
    if args.profile:
        args.profile = arguments.directory("--profile", args.profile).absolute()
    terminal.say(model_line(specs))
    groups = [[spec] for spec in specs] if args.apart else [specs]
    rate = None
    reference = None
    for group in groups:
        for row in take_turns(group, args):
            seconds = row.get("seconds")
            if row["system"] == RATE:
                rate = row.get("tflops")
            elif seconds:
                reference = reference or seconds
                row["times"] = seconds / reference
                row["share"] = row["tflops"] / rate if rate else None
            yield row


def take_turns(specs: Sequence[Specification], pace: argparse.Namespace) -> list[Row]:
    """Measure systems in turns, a block of steps each; note the failure of one and go on with the others."""
    temporary = tempfile.TemporaryDirectory(prefix="benchmark-")
    with temporary as folder, contextlib.ExitStack() as stack:
        systems = [Measured(spec, pace, folder, stack) for spec in specs]
        turns = [Measured.start, *[Measured.take] * pace.blocks, Measured.finish]
        for turn, each in product(turns, systems):
            try:
                if "failed" not in each.row:
                    turn(each)
            except WorkerFailed as error:
                each.row["failed"] = str(error)
                terminal.say(f"{each.row['name']}: not measured: {error}")
    return [each.row for each in systems]


@dataclass
class Measured:
    """One system in its turns, and its row."""

    spec: Specification
    pace: argparse.Namespace
    folder: str
    stack: contextlib.ExitStack

    def __post_init__(self) -> None:
        spec = self.spec
        self._place = spec.name.replace(", ", "-").replace("/", "-")
        self.row: Row = {"name": spec.name, "system": spec.system, "steps": []}
        self._others = list[float]()

    def start(self) -> None:
        """Start the process of the system and warm it up."""
        began = time.perf_counter()
        self._worker = Worker(self.spec, Path(self.folder, f"{self._place}.txt"))
        self.stack.callback(self._worker.end)
        built = time.perf_counter()
        self._worker.ask("run", self.pace.warm_up)
        self.row["start_s"] = built - began
        self.row["warm_up_s"] = time.perf_counter() - built
        terminal.say(f"{self.spec.name}: ready")

    def take(self) -> None:
        """Measure a block of steps, and how busy other programs were meanwhile."""
        began = time.perf_counter()
        others = _seconds_of_others()
        self.row["steps"] += self._worker.ask("run", self.pace.steps)
        cores = (time.perf_counter() - began) * (psutil.cpu_count() or 1)
        self._others.append(max(0.0, _seconds_of_others() - others) / cores)

    def finish(self) -> None:
        """Summarise the steps; measure memory, and then what disturbs the timing, a profile."""
        row = self.row
        seconds, tokens, operations = zip(*row["steps"], strict=True)
        median = statistics.median(seconds)
        row |= {"seconds": median, "fastest": min(seconds)}
        row["tflops"] = statistics.mean(operations) / median / 1e12
        row["others"] = statistics.median(self._others)
        if self.spec.system == RATE:
            return
        row["tokens_per_s"] = statistics.mean(tokens) / median
        row["peak_bytes"] = self._worker.ask("peak_bytes")
        if self.spec.compiled:
            row |= self._worker.ask("graphs")
        if self.pace.profile:
            self.pace.profile.mkdir(parents=True, exist_ok=True)
            row["profile"] = self._worker.ask(
                "profile", str(self.pace.profile / f"{self._place}.json"), PROFILED
            )
            terminal.say(f"\n{row['name']}\n{table(row['profile'], PROFILE)}")
        self._worker.end()


def _seconds_of_others() -> float:
    """Return the CPU seconds of all programs but this one and its children, since the machine started."""
    every = psutil.cpu_times()
    seconds = float(every.user + every.system)
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            seconds -= sum(process.cpu_times()[:2])
    return seconds
