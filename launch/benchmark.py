"""Measure speeds beside what bounds them: the steps of a data preparation, the whole of it, the loader; banded attention.

python launch/benchmark.py data --source jsonl --name 'corpus/*.jsonl.zst' --samples gpt bert --mb 60
python launch/benchmark.py attention
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # replace launch/, which would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch.benchmarks import attention_speed
from launch.console import arguments, quiet
from launch.machine import ending

EXAMPLES = """\
benchmarks:
  data        documents/s and MB/s of every step of prepare_data.py, of all of it, and tokens/s of the loader
  attention   forward and backward of dense and of locally banded attention (model.attention) over sequence lengths

examples:
  python launch/benchmark.py data --help
  python launch/benchmark.py data --mb 20 --out speeds.json
  python launch/benchmark.py attention --positions 1024 2048 4096 --windows 128
exit codes: 0 measured, 1 failed, 2 refused."""

DATA_EXAMPLES = """\
examples:
  python launch/benchmark.py data
      20 MB of the packaged corpus, for a GPT's store and for a BERT's, and the loader of two recipes; some minutes
  python launch/benchmark.py data --source jsonl --name corpus.jsonl --samples gpt --mb 60 --parts preparation --out speeds.json
      60 MB of your own text, and the numbers as JSON
  python launch/benchmark.py data --parts loader --recipes bert/sotu --train_steps 20
      what the loader takes of a step of real training on this machine

What is printed:
  steps       each alone in one process with one thread, by processor time; "raw tokenizers" is the library alone on the same texts
  both ways   wall time with all workers, by turns, medians of --rounds: `tokenizers` with threads and with processes (the faster is the
              ceiling), and the preparation's own step
  whole       a preparation from beginning to end, without what it takes to start (shown apart), as a share of the time that
              `tokenizers` needs for the same texts on the same cores. Goals: the step 90 %, the whole 80 %
  loader      a batch asked for right after the other; and waited for after a pause as long as a training step, if that is known
The text decides much of it: caches like repetition. On a machine that others use, the ratios of processor time are the steady ones, which
do not see processes that wait for each other; raise --rounds for those of wall time.
exit codes: 0 measured, 1 failed, 2 refused."""
GOALS = {
    "tokenization_of_raw": 0.90,
    "tokenization_of_raw_processor": 0.90,
    "whole_of_ceiling": 0.80,
    "whole_of_ceiling_processor": 0.80,
}
NOT_MEASURED = "not measured"


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    _add_data(benchmarks)
    attention_speed.add_parser(benchmarks)
    return parser


def _add_data(benchmarks: Any) -> None:
    from launch import prepare_data

    parser = benchmarks.add_parser("data", help="the steps of a preparation, the whole of it, and the loader", epilog=DATA_EXAMPLES,
                                   formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
    prepare_data.add_source(parser.add_argument_group("what is read"))
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--parts",
        nargs="+",
        choices=("preparation", "loader"),
        default=["preparation", "loader"],
        help="default: both",
    )
    group.add_argument("--samples", nargs="+", choices=("gpt", "bert"), default=["gpt", "bert"], help="stores that are prepared "
                       "(default: both)")  # fmt: skip
    group.add_argument("--mb", type=float, default=20.0, help="MB of text (default: %(default)s)")
    group.add_argument("--workers", type=int, metavar="N", help="worker processes (default: cores)")
    group.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="turns of which the medians are taken (default: %(default)s)",
    )
    group.add_argument("--gpt_tokenizer", default="gpt2", metavar="KIND[:PATH]", help="as --tokenizer of prepare_data.py "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument(
        "--bert_tokenizer", default="trained_wordpiece", metavar="KIND[:PATH]", help="(default: %(default)s)"
    )
    group.add_argument(
        "--vocab_size",
        type=int,
        default=30522,
        metavar="N",
        help="of trained vocabularies (default: %(default)s)",
    )
    group.add_argument("--recipes", nargs="+", default=["default/sotu", "bert/sotu"], metavar="TABLE/ROW", help="whose loader is measured "
                       "(default: default/sotu bert/sotu)")  # fmt: skip
    group.add_argument(
        "--loader_steps", type=int, default=100, metavar="N", help="batches (default: %(default)s)"
    )
    group.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one field of the recipes"
    )
    group.add_argument(
        "--step_seconds", type=float, metavar="S", help="a training step of the recipes takes so long"
    )
    group.add_argument("--train_steps", type=int, default=0, metavar="N", help="or measure it by N steps of training (default: "
                       "%(default)s)")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write all numbers as JSON")
    parser.set_defaults(run=run_data)


def main() -> None:
    from launch import prepare_data

    args = build_parser().parse_args()
    quiet.quiet_libraries()
    try:
        args.run(args)
    except ValueError as e:
        ending.refuse(prepare_data.in_flags(e))
    except RuntimeError as e:
        ending.refuse(prepare_data.in_flags(e), code=1)


def run_data(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: flags or input forbid it.
        RuntimeError: a process that measures failed.
    """
    args.workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    check(args)
    from data.prepare import report
    from launch.machine import description

    machine = {**description.describe(), "data_versions": report.versions()}
    result: dict[str, Any] = {
        "command": sys.argv,
        "hardware": machine,
        "rounds": args.rounds,
        "workers": args.workers,
    }
    print(
        f"{description.summary(machine)}; {args.workers} workers; load average at the start {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    result["load_average"] = os.getloadavg()[0]
    if "preparation" in args.parts:
        result["preparation"] = {}
        for samples in args.samples:
            result["preparation"][samples] = measured = measure_preparation(args, samples)
            print("\n".join(preparation_table(samples, measured)), flush=True)
    if "loader" in args.parts:
        result["loader"] = {}
        for recipe in args.recipes:
            result["loader"][recipe] = measured = measure_loader(args, recipe)
            print("\n".join(loader_table(recipe, measured)), flush=True)
    for part in ("preparation", "loader"):
        if part not in args.parts:
            result[part] = NOT_MEASURED
            print(f"\n{part}: {NOT_MEASURED}")
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError with all that is wrong with the flags."""
    problems = [f"--{flag} {getattr(args, flag)}: give a number above 0" for flag in ("mb", "workers", "rounds", "loader_steps")
                if getattr(args, flag) <= 0]  # fmt: skip
    if args.train_steps < 0:
        problems.append(f"--train_steps {args.train_steps}: give 0 or more")
    if args.step_seconds is not None and args.step_seconds <= 0:
        problems.append(f"--step_seconds {args.step_seconds}: give seconds above 0")
    if args.step_seconds and args.train_steps:
        problems.append(
            "--step_seconds says how long a step takes, --train_steps measures it: leave one of the two out"
        )
    if args.limit is not None:
        problems.append("--limit: the amount of text is given by --mb here")
    if args.out and not Path(args.out).resolve().parent.is_dir():
        problems.append(f"--out {args.out}: the directory is not there")
    if problems:
        raise ValueError("\n".join(problems))


def measure_preparation(args: argparse.Namespace, samples: str) -> dict[str, Any]:
    from launch.benchmarks import benchmark_text, preparation_speed, tokenizing_teams

    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        settings, text = benchmark_text.choose_input(settings_for(args, samples), args.mb, folder)
        print(f"\n{samples}: {text}", flush=True)
        settings = preparation_speed.save_tokenizer(settings, folder)
        steps = preparation_speed.steps_alone(settings, folder)
        task = tokenizing_teams.Task(folder / "batches.pickle", folder / "tokenizer", samples)
        whole = preparation_speed.Whole()
        rounds = tokenizing_teams.measure(
            task,
            tokenizing_teams.ways(args.workers),
            args.rounds,
            lambda: preparation_speed.prepare_once(settings, folder, whole),
        )
        return preparation_speed.summary(text, steps, rounds, whole)


def settings_for(args: argparse.Namespace, samples: str):
    """What prepare_data.py makes of these flags, its defaults for the rest."""
    from launch import prepare_data

    tokenizer = args.bert_tokenizer if samples == "bert" else args.gpt_tokenizer
    flags = [
        "--out",
        "OUT",
        "--samples",
        samples,
        "--tokenizer",
        tokenizer,
        "--vocabulary_mb",
        "16",
        "--workers",
        str(args.workers),
    ]
    flags += ["--vocab_size", str(args.vocab_size)] if tokenizer.startswith("trained") else []
    own = prepare_data.build_parser().parse_args(flags)
    for name in (
        "source",
        "name",
        "config",
        "revision",
        "split",
        "text_column",
        "documents",
        "sentences",
        "max_record_mb",
    ):
        setattr(own, name, getattr(args, name))
    return prepare_data.settings_of(own)


def preparation_table(samples: str, measured: dict[str, Any]) -> list[str]:
    rows = [("one core", "documents/s", "MB/s", "share")]
    for name, step in measured["steps"].items():
        share = f"{step['share']:.1%}" if step["share"] else ""
        rows.append((name, f"{step['documents_per_s']:,.0f}", f"{step['mb_per_s']:,.2f}", share))
    teams = [("all workers, by turns", "MB/s", "seconds, median", "least", "most", "of processor time")]
    for name, team in measured["teams"].items():
        seconds = (f"{team[key]:.2f}" for key in ("mb_per_s", "median", "least", "most", "processor_seconds"))
        teams.append((name, *seconds))
    whole, ratios = measured["whole"], measured["ratios"]
    seconds = (f"{whole[key]:.2f}" for key in ("mb_per_s", "seconds", "least", "most", "processor_seconds"))
    teams.append(("whole preparation", *seconds))
    imports, rest = whole["import_seconds"], whole["start_seconds"]
    start = (
        f"to start: {imports:.1f} s of imports and {rest:.1f} s of worker processes, tokenizer, publishing"
    )
    return [
        "", f"--- preparation, {samples}: {measured['tokenized_mb']:.1f} MB of text tokenized", *table(rows), "", *table(teams), start,
        f"peak memory {whole['peak_mb']:,} MB, all processes",
        *(f"{TITLES[name]}: {value:.1%}" + (f" (goal {GOALS[name]:.0%})" if name in GOALS else "") for name, value in ratios.items()),
    ]  # fmt: skip


TITLES = {
    "tokenization_of_raw": "tokenization of raw `tokenizers`, all workers",
    "tokenization_of_raw_processor": "  by processor time",
    "tokenization_of_raw_one_core": "  by processor time, one core",
    "whole_of_ceiling": "whole of its ceiling, raw `tokenizers` on the same texts and cores; start apart",
    "whole_of_ceiling_processor": "  by processor time",
    "whole_of_ceiling_with_start": "  with the start",
}


def measure_loader(args: argparse.Namespace, name: str) -> dict[str, Any]:
    from data import corpus
    from launch.benchmarks import loader_speed
    from recipes import catalog

    recipe = catalog.load(name, args.set)
    training = loader_speed.train(name, args.set, args.train_steps) if args.train_steps else None
    seconds = training["seconds"] if training else args.step_seconds
    samples = corpus.build(recipe, say=lambda line: print(line, flush=True)).train
    rows = [loader_speed.measure(recipe, samples, workers, args.loader_steps, seconds) for workers in (0, 1)]
    return {
        "tokens_per_step": recipe.batch.global_ * recipe.sequence_length,
        "step_seconds": NOT_MEASURED if seconds is None else seconds,
        "training": training or NOT_MEASURED,
        "workers": rows,
    }


def loader_table(name: str, measured: dict[str, Any]) -> list[str]:
    from launch.benchmarks import loader_speed

    known = measured["step_seconds"] != NOT_MEASURED
    rows = [("loader threads", "tokens/s", "us per step", "us waited after a step", "share of step")]
    for row in measured["workers"]:
        waited = (
            (f"{row['wait_microseconds']:,.0f}", f"{row['wait_share_of_step']:.3%}")
            if known
            else (NOT_MEASURED, NOT_MEASURED)
        )
        rows.append(
            (
                str(row["workers"]),
                f"{row['tokens_per_s']:,.0f}",
                f"{row['microseconds_per_step']:,.0f}",
                *waited,
            )
        )
    step = (
        f"{measured['step_seconds']:.3f} s"
        if known
        else NOT_MEASURED + " (--train_steps 20, or --step_seconds)"
    )
    lines = [
        "",
        f"--- loader, {name}: {measured['tokens_per_step']:,} tokens per step; a training step: {step}",
        *table(rows),
    ]
    if measured["training"] != NOT_MEASURED:
        wait, whole = measured["training"]["data_seconds"], measured["training"]["seconds"]
        share = f"{wait / whole:.3%} (goal: below {loader_speed.GOAL:.0%})"
        lines.append(
            f"in training itself: {wait * 1e6:,.0f} us of {whole:.3f} s waited for the batch, {share}"
        )
    return lines


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side; the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


if __name__ == "__main__":
    main()
