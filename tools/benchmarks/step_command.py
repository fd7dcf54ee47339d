"""`benchmark.py step`: flags, measurement and output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from ds_configs.resolver import resolve
from launch.console import arguments, new_output, terminal
from launch.machine import description
from recipes.problems import Problem, ProblemsError
from tools.benchmarks import step_speed, step_text
from tools.benchmarks.specification import Specification
from tools.benchmarks.step_speed import RATE, Pace
from tools.benchmarks.turns import WorkerFailed

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
      --plot step.png --out step.json
      also traces for chrome://tracing, and the operations that take longest

systems:
  ours          our engine as training runs it: the loader's batches, the
                step, what ranks tell each other
  transformers  its model under the same resolved DeepSpeed JSON, in a loop
                without anything else
  bare          our model in a PyTorch loop with flat fp32 masters
                and torch's fused AdamW: what DeepSpeed and our loop cost
  nano          a plain GPT-2 in the manner of nanoGPT; weights in bf16 on a
                CPU, autocast on a GPU
All read the same batches. Ours and bare keep freed memory, as
pretrain.py does on a CPU; the others run as torch starts them. Shares
are of the rate of a large square product, and of the mean rate of the
products that the model consists of, measured between the systems'
turns; operations are counted exactly, those of recomputation not.
Memory is of the process, or of the GPU."""

RULES = (("--ranks", "--set parallel.dp", "both decide it"),)
VARIANTS = ("eager", "compiled")
# Name -> (title, the variants that are measured by default).
SYSTEMS: dict[str, tuple[str, Sequence[str]]] = {
    "ours": ("ours", ("compiled", "eager")),
    "bare": ("bare loop", ("compiled",)),
    "nano": ("as nanoGPT", ("compiled",)),
    "transformers": ("transformers", ("eager",)),
}
UNDER_DEEPSPEED = ("ours", "transformers")  # measured under every configuration
PICTURES = (".png", ".svg", ".pdf")


def add_flags(parser: argparse.ArgumentParser) -> None:
    arguments.add_recipe_arguments(parser, ends=False)
    add = parser.add_argument_group("what is measured").add_argument
    configs = "DeepSpeed JSONs, as paths or bare names in ds_configs/ (default: zero1)"
    add("--ds_config", nargs="+", default=["zero1"], metavar="FILE", help=configs)
    add(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=list(SYSTEMS),
        help="default: all",
    )
    variants = "default: both of ours, compiled bare and nano, eager transformers"
    add("--variants", nargs="+", choices=VARIANTS, help=variants)
    ranks = "data-parallel ranks that share the cores; bare and nano average with torch's DDP (default: 1)"
    add("--ranks", type=arguments.whole(most=64), default=1, metavar="N", help=ranks)
    add(
        "--no_launch",
        action="store_true",
        help="leave out the seconds from a launch to its first step",
    )
    add(
        "--profile",
        metavar="DIR",
        help="write torch's traces there, and show what takes longest",
    )
    add("--plot", metavar="FILE", help="draw the table, as .png, .svg or .pdf")
    add = parser.add_argument_group("how long").add_argument
    for flag, default, what in (
        ("--blocks", 5, "turns of each system"),
        ("--steps", 6, "of a turn"),
        ("--warm_up", 4, "steps before the first turn"),
    ):
        count = arguments.whole(most=10**6)
        said = f"{what} (default: %(default)s)"
        add(flag, type=count, default=default, metavar="N", help=said)
    apart = (
        "one system after the other, not in turns: for models of which memory holds one"
    )
    add("--apart", action="store_true", help=apart)


def specifications(args: argparse.Namespace) -> list[Specification]:
    """Return the requested systems, ours first."""

    def made(name: str, system: str, config: str, compiled: bool) -> Specification:
        ranks = 1 if system == RATE else args.ranks
        settings = (
            (*args.set, f"parallel.dp={ranks}") if args.ranks > 1 else tuple(args.set)
        )
        return Specification(
            name, system, args.recipe, settings, args.tiny, config, compiled, ranks
        )

    first = args.ds_config[0]
    found = []
    family = made("", "", "", False).load().model.family
    for system, (title, usual) in SYSTEMS.items():
        if system not in args.systems:
            continue
        if system == "nano" and family == "bert":
            terminal.say("nano: not measured: there is no plain loop for BERT")
            continue
        several = system in UNDER_DEEPSPEED
        configs = args.ds_config if several else [first]
        for config, variant in product(configs, args.variants or usual):
            name = f"{title}, {config}, {variant}" if several else f"{title}, {variant}"
            found.append(made(name, system, config, variant == "compiled"))
    return [*found, made("matrix rate", RATE, first, False)]


def measure(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Measure the systems, print the tables and return the numbers. Raises ValueError."""
    specs = specifications(args)
    if "ours" not in args.systems and args.no_launch:
        came = "--no_launch without --systems ours"
        raise ProblemsError(
            [Problem("--no_launch", came, "it is about ours", "leave it out")]
        )
    if args.plot is not None:
        new_output.new_file("--plot", args.plot, PICTURES)
    folder = (
        arguments.directory("--profile", args.profile).absolute()
        if args.profile
        else None
    )
    described = model_line(specs)
    terminal.say(described)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    pace = Pace(args.blocks, args.steps, args.warm_up, args.apart)
    measured = step_speed.measure(specs, pace, terminal.say, folder)
    rows = step_speed.speed_rows(measured)
    found: dict[str, Any] = {"model": described, "rows": [asdict(row) for row in rows]}
    found["measured"] = [asdict(each) for each in measured]
    if rows:
        print(f"\n{step_text.rates(measured)}\n\n{step_text.speeds(rows)}")
        print(f"{step_text.disturbance(measured)}\n\n{step_text.parts(measured)}")
        print(f"{step_text.starts(measured)}\n{step_text.profile_tables(measured)}")
        if args.plot:
            step_text.draw(rows, Path(args.plot), described)
    if not args.no_launch and "ours" in args.systems:
        try:
            start = step_speed.launch_seconds(specs[0])
            found["launch"] = {**asdict(start), "seconds": start.seconds}
            print(f"pretrain.py: {start}")
        except WorkerFailed as error:
            print(f"launch to first step: not measured: {error}")
    return found


def model_line(specs: Sequence[Specification]) -> str:
    """Describe the model and its batch in one line. Raises ValueError if a configuration refuses it."""
    machine = description.detect_machine()
    plans = []
    for spec in specs:
        recipe = spec.load()
        if recipe.model.implementation == "transformers":
            rule = "it runs transformers' modules, which are a system of their own here"
            fix = "--set model.implementation=megarecipes"
            raise ProblemsError(
                [Problem("--recipe", f"--recipe {spec.recipe}", rule, fix)]
            )
        plans.append(resolve(recipe, spec.ds_config, spec.processes, machine))
    model = recipe.model
    layout = plans[0].layout
    return (
        f"{specs[0].recipe}: {model.family}, {model.layers} layers, hidden {model.hidden}, "
        f"{model.heads} heads, vocabulary {model.vocab_size}, sequence {recipe.sequence_length}, "
        f"{plans[0].precision}; micro-batch {layout.micro} x {layout.accumulation}, "
        f"dropout {recipe.dropout.hidden:g}"
    )
