"""Measure speeds next to what bounds them and to what others reach: training steps, data, attention.

python launch/benchmark.py step
python launch/benchmark.py data --source jsonl --name 'corpus/*.jsonl.zst' --samples gpt bert --limit 20000
python launch/benchmark.py attention
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tabulate import tabulate

from data.prepare.settings import PreparationFailed, Settings
from launch.console import arguments, ends, output, preparation_flags, quiet
from launch.experiments.benchmarks import (
    attention_speed,
    checkpoint_command,
    data_speed,
    gpu_command,
    layout_command,
    step_command,
)
from launch.experiments.benchmarks.attention_speed import DTYPES, Row, Shape
from launch.experiments.benchmarks.data_speed import LEAST_MB
from launch.machine import description
from launch.ranks import ending
from recipes.plural import counted

EXAMPLES = """\
examples:
  python launch/benchmark.py step
      our training step next to transformers, a bare loop, a plain GPT-2, and the machine's matrix rate
  python launch/benchmark.py layouts
      tensor, pipeline and data parallelism here next to one process, and where the difference goes
  python launch/benchmark.py scaling --plot scaling.png
      weak and strong scaling over the cores or GPUs at hand
  python launch/benchmark.py checkpoint --folder $SCRATCH
      save and load next to the disk's own rate
  python launch/benchmark.py gpu
      everything that one GPU can tell, in steps of minutes
  python launch/benchmark.py data --out speeds.json
      MB/s of each step of prepare_data.py and of the whole, next to raw tokenizers; the loader
  python launch/benchmark.py attention --positions 1024 2048 4096 --windows 128
      forward and backward of dense and of locally banded attention (model.attention)
exit codes: 0 measured, 1 failed, 2 refused."""

DATA_EXAMPLES = """\
examples:
  python launch/benchmark.py data
      the packaged corpus, for a GPT's store and for a BERT's, and the loader of two recipes; some minutes
  python launch/benchmark.py data --source jsonl --name corpus.jsonl --limit 20000 --samples gpt --recipes
      20,000 of your own documents, and no loader
  python launch/benchmark.py data --samples --recipes bert/sotu --train_steps 20
      what the loader takes of a step of real training on this machine

Steps are measured by processor time of one core, the whole by wall time with all workers, as are `tokenizers`
alone with threads on the same cores and texts. The text decides much of it: caches like repetition."""

ATTENTION_EXAMPLES = """\
examples:
  python launch/benchmark.py attention
      512 to 8192 positions, windows of 64 and 256, on the accelerator or else the CPU; minutes on two cores
  python launch/benchmark.py attention --positions 2048 --windows 128 256 --heads 32 --head_size 96
      your own shape

Attention alone (scores, softmax, values) of one layer, forward and backward, without projections; wall time.
  dense     causal attention over all positions, as the dense layers of a GPT-2 run it
  banded    the kernel that training takes for this case; it depends on --dropout: give the recipe's
            dropout.attention, with which flex_attention is never taken
  masked    all scores, those outside of the band masked: what a band costs without a kernel for it
  scores    share of the dense triangle that lies in the band: its inverse bounds what can be gained"""

TOO_SMALL = f"starting worker processes takes longer than {LEAST_MB} MB of text; give more"
SAMPLES = ["gpt", "bert"]
COMMANDS: dict[str, tuple[str, str, Any, Any]] = {
    "step": (
        "the training step next to others", step_command.EXAMPLES,
        step_command.add_flags, step_command.measure,
    ),
    "layouts": (
        "what TP2, PP2 and DP2 cost here", layout_command.EXAMPLES,
        layout_command.add_layout_flags, layout_command.measure_layouts,
    ),
    "scaling": (
        "data parallelism over processes", layout_command.SCALING_EXAMPLES,
        layout_command.add_scaling_flags, layout_command.measure_scaling,
    ),
    "checkpoint": (
        "save and load", checkpoint_command.EXAMPLES, checkpoint_command.add_flags, checkpoint_command.measure
    ),
    "gpu": ("all that one GPU can tell", gpu_command.EXAMPLES, gpu_command.add_flags, gpu_command.measure),
}  # fmt: skip
COUNT: dict[str, Any] = dict(type=int, metavar="N")
RECIPES = ["default/sotu", "bert/sotu"]
DATA_FLAGS: dict[str, dict[str, Any]] = {
    "samples": dict(nargs="*", choices=SAMPLES, default=SAMPLES, help="stores to prepare (default: both)"),
    "workers": COUNT | dict(default=len(os.sched_getaffinity(0)), help="processes (default: cores)"),
    "vocab_size": COUNT | dict(default=30522, help="of the trained WordPiece (default: %(default)s)"),
    "recipes": dict(nargs="*", default=RECIPES, metavar="TABLE/ROW", help="whose loader is measured"),
    "set": dict(action="append", default=[], metavar="KEY=VALUE", help="override one field of the recipes"),
    "train_steps": COUNT | dict(default=0, help="also train N steps, for the loader's share of one"),
}
MOST_WORKERS = 1024  # as of prepare_data.py
COUNTS: dict[str, Any] = dict(nargs="+", type=int)
LENGTHS = [512, 1024, 2048, 4096, 8192]
ATTENTION_FLAGS: dict[str, dict[str, Any]] = {
    "positions": COUNTS | dict(default=LENGTHS, metavar="S", help="tokens (default: %(default)s)"),
    "windows": COUNTS | dict(default=[64, 256], metavar="W", help="default: 64 256"),
    "dtypes": dict(nargs="+", choices=DTYPES, default=["fp32", "bf16"], help="default: fp32 bf16"),
    "heads": COUNT | dict(default=12, help="default: %(default)s"),
    "head_size": dict(type=int, default=64, metavar="D", help="default: %(default)s"),
    "batch": dict(type=int, default=1, metavar="B", help="samples (default: %(default)s)"),
    "dropout": dict(type=float, default=0.0, metavar="P", help="on attention weights (default: %(default)s)"),
    "rounds": COUNT | dict(default=5, help="passes that are timed (default: %(default)s)"),
    "threads": COUNT | dict(help="of torch on a CPU (default: cores)"),
    "seconds": dict(type=float, default=2.0, metavar="S", help="of a pass: beyond, longer ones are left out"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    shown: dict[str, Any] = {"formatter_class": arguments.Help, "allow_abbrev": False}
    data = benchmarks.add_parser("data", help="the preparation and the loader", epilog=DATA_EXAMPLES, **shown)
    preparation_flags.add_source(data.add_argument_group("what is read"))
    band = benchmarks.add_parser("attention", help="dense against banded", epilog=ATTENTION_EXAMPLES, **shown)
    parts = (data, DATA_FLAGS, measure_data), (band, ATTENTION_FLAGS, measure_attention)
    for name, (told, examples, add_flags, measure) in COMMANDS.items():
        command = benchmarks.add_parser(name, help=told, epilog=examples, **shown)
        add_flags(command)
        command.add_argument("--out", metavar="FILE", help="write all numbers as JSON")
        command.set_defaults(measure=measure)
    for part, flags, measure in parts:
        group = part.add_argument_group("what is measured")
        for flag, how in flags.items():
            group.add_argument(f"--{flag}", **how)
        part.add_argument("--out", metavar="FILE", help="write all numbers as JSON")
        part.set_defaults(measure=measure)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    quiet.quiet_libraries()
    try:
        check(args)
        machine, load = description.describe(), os.getloadavg()[0]
        print(f"{description.summary(machine)}; load average at the start {load:.1f}", flush=True)
        result = {"command": sys.argv, "hardware": machine, "load_average": load}
        result |= args.measure(args, machine)
    except (ValueError, PreparationFailed) as error:
        code = error.exit_code if isinstance(error, PreparationFailed) else 2
        ending.refuse(preparation_flags.shown(error), code)
    if args.out is not None:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError with all that is wrong with the flags."""
    positive = ("workers", "vocab_size", "batch", "heads", "head_size", "rounds", "threads", "seconds")
    given = [(flag, getattr(args, flag, None)) for flag in positive]
    given += [(flag, value) for flag in ("positions", "windows") for value in getattr(args, flag, ())]
    wrong = [(flag, value) for flag, value in given if value is not None and value <= 0]
    problems = [f"--{flag} {value}: give a number above 0" for flag, value in wrong]
    if not 0 <= getattr(args, "dropout", 0) < 1:
        problems.append(f"--dropout {args.dropout}: give a probability from 0 to below 1")
    if getattr(args, "train_steps", 0) < 0:
        problems.append(f"--train_steps {args.train_steps}: give 0 or more")
    banded = args.measure is measure_attention and not problems
    if banded and min(args.windows) >= (most := max(args.positions)):
        came = f"--windows {min(args.windows)} and more with --positions up to {most}"
        problems.append(f"{came}: such a band is the whole triangle; give a window below {most}")
    if getattr(args, "workers", 0) > MOST_WORKERS:
        problems.append(f"--workers {args.workers}: give at most {MOST_WORKERS} processes")
    if args.out is not None:
        try:
            output.new_file("--out", args.out)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def measure_data(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    preparation, loader = {}, {}
    for samples in args.samples:
        preparation[samples] = found = data_speed.measure_preparation(settings_of(args, samples))
        print(
            f"\n{samples}: {counted(found['documents'], 'document')}, {found['text_mb']:.1f} MB of text kept"
        )
        speeds: list[tuple[str, float]] = [
            (f"{step}, one core", speed) for step, speed in found["steps"].items()
        ]
        speeds.append(("whole, all workers", found["mb_per_second"]))
        speeds.append(("raw tokenizers", found["raw_mb_per_second"]))
        print(tabulate(speeds, headers=("", "MB/s"), tablefmt="plain", floatfmt=",.2f"))
        if found["share"] is None:
            print(f"too small to compare: {TOO_SMALL}; peak memory {found['peak_mb']:,} MB", flush=True)
            continue
        share = f"the whole has {found['share']:.1%} of the speed of raw tokenizers by wall time"
        print(f"{share}, {found['processor_share']:.1%} by processor time")
        print(f"peak memory {found['peak_mb']:,} MB", flush=True)
    for name in args.recipes:
        loader[name] = found = data_speed.measure_loader(name, args.set, args.train_steps)
        print(f"\nloader of {name}: {found['tokens_per_step']:,} tokens per step")
        paces = [(n, us, found["tokens_per_step"] / us * 1e6) for n, us in found["microseconds"].items()]
        headers = ("threads", "us per step", "tokens/s")
        print(tabulate(paces, headers=headers, tablefmt="plain", floatfmt=",.0f"))
        waited, wait, whole = "not measured (--train_steps 20)", found["data_seconds"], found["step_seconds"]
        if whole:
            waited = f"{wait * 1e6:,.0f} us of {whole:.3f} s, {wait / whole:.3%}"
        print(f"waited for the batch in a training step: {waited}", flush=True)
    return {"workers": args.workers, "preparation": preparation, "loader": loader}


def settings_of(args: argparse.Namespace, samples: str) -> Settings:
    """What prepare_data.py makes of these flags, its defaults for the rest.

    Vocabularies are GPT-2's and a trained WordPiece.
    """
    kind = ["gpt2"] if samples == "gpt" else ["trained_wordpiece", "--vocab_size", str(args.vocab_size)]
    parser = argparse.ArgumentParser()
    preparation_flags.add(parser)
    flags = ["--out", "OUT", "--samples", samples, "--vocabulary_mb", "16", "--tokenizer", *kind]
    own = vars(parser.parse_args(flags))
    shared = own.keys() & vars(args).keys() - {"samples", "vocab_size"}
    return preparation_flags.settings_of(argparse.Namespace(**own | {k: getattr(args, k) for k in shared}))


def measure_attention(args: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if machine["accelerators"] else "cpu"
    shape = Shape(*(getattr(args, field.name) for field in fields(Shape)))
    print(f"{shape}; forward + backward; {torch.get_num_threads()} threads\n", flush=True)
    rows: list[Row] = []
    for dtype in args.dtypes:
        cases = (args.positions, args.windows, device, args.seconds)
        for row in attention_speed.measure_dtype(shape, dtype, *cases):
            rows.append(row)
            print(f"{dtype}, {row.positions} positions, window {row.window}: {row.status}", flush=True)
    print("\n" + attention_table(rows))
    left_out = attention_speed.not_measured(args.dtypes, args.positions, args.windows, device, rows)
    print("\n" + "\n".join(f"not measured: {line}" for line in left_out))
    settings = asdict(shape) | {"seconds": args.seconds}
    found = {"device": device, "threads": torch.get_num_threads(), "settings": settings}
    return found | {"rows": [asdict(row) for row in rows], "not_measured": left_out}


def attention_table(rows: list[Row]) -> str:
    """A line per case; times in milliseconds."""
    shown = []
    for row in rows:
        times = (row.dense_s, row.banded_s, row.masked_s)
        cells = [row.status if t is None else f"{1e3 * t:.1f}" for t in times]
        faster = f"{row.dense_s / row.banded_s:.2f}x" if row.dense_s and row.banded_s else "-"
        shown.append((row.dtype, row.positions, row.window, row.kernel, *cells, faster, f"{row.scores:.1%}"))
    times_of = ("dense ms", "banded ms", "masked ms", "faster", "scores")
    headers = ("dtype", "positions", "window", "kernel", *times_of)
    return tabulate(shown, headers=headers, tablefmt="plain", disable_numparse=True, stralign="right")


if __name__ == "__main__":
    ends.run(main)
