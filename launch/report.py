"""Published tables next to measured numbers, and runs compared: one HTML page with plots, and CSV.

python launch/report.py runs/a runs/b
python launch/report.py runs --table jeanzay_megatron_performance
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import ends
from launch.console.terminal import say
from recipes.files import path_of
from recipes.problems import Problem, ProblemsError, counted
from recipes.tables import FOLDER

if TYPE_CHECKING:
    from launch.reports.document import ReportDocument
    from launch.reports.runs import ReportedRun

EXAMPLES = """\
examples:
  python launch/report.py runs
      every run below runs/, each in the table of its recipe, next to what was
      published
  python launch/report.py runs/zero1 runs/zero3
      two runs: curves over each other, what differs in how they were made and
      in what came out (up to 6 runs)
  python launch/report.py runs/batch8 runs/batch64 --over tokens
      the losses over the tokens that they took
  python launch/report.py 'runs/dgx2*' --table dgx2_gpt2_model_parallel
      only this table, with those of the runs that belong to it
  python launch/report.py --table jeanzay_megatron_performance
      the table as published, with nothing run
  python launch/report.py runs --all --out reports/july
      every published table, run or not
  python launch/report.py runs/mine --card card.png --usd_per_gpu_hour 2.5
      one run in a picture of 1200 x 630 pixels, with what its steps cost

A run is a directory with recipe.yaml, metrics.jsonl and, once it has ended,
result.json; one that is still running is shown as unfinished. Tiny runs are
marked. They get no ratio to published numbers, nor do runs that change the
model, the sequence length, the batch, what is recomputed, tp, pp, dp or what
ZeRO shards and offloads, nor emulated fp16. A † marks published rows that
have errata. The planner's prediction of a row is in
launch/plan.py --recipe TABLE/ROW.
Scores of fine-tuning runs stand next to those that the row of their
pretraining published.
Writes report.html (plots inside, no network, no scripts) and report.csv. A
former report there is replaced; other files never. Long curves are drawn as
means of neighbouring steps, at most 1000 points each.
exit codes: 0 written; 1 written, but some file of a run or of a table could
not be read (they are named); 2 refused, nothing written."""


RULES = (
    ("--card", "--table, --all, --over, --out", "a card is of one run"),
    ("--usd_per_gpu_hour", "+--card", "a card says what a run cost"),
)


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    """Write the requested report and return the exit code. `folder` holds the tables."""
    args = build_parser().parse_args(arguments)
    try:
        return report(args, folder)
    except ValueError as error:
        say(f"\n{error}\n", sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    from launch.console.arguments import command, number

    parser = command(__doc__, EXAMPLES, RULES)
    add = parser.add_argument
    runs = "a run directory, a glob of them, or a folder with runs somewhere below it"
    table = "only this table of recipes/, run or not; a YAML file of your own will do; repeatable"
    add("runs", nargs="*", metavar="RUN", help=runs)
    add("--table", action="append", default=[], metavar="NAME", help=table)
    add(
        "--all",
        action="store_true",
        help="every published table, also where nothing of it was run",
    )
    add(
        "--over",
        choices=("steps", "tokens", "hours"),
        default="steps",
        help="what losses are drawn over (default: %(default)s); hours are those of the steps",
    )
    add(
        "--out", metavar="DIR", help="where to write (default: reports/<table or runs>)"
    )
    add(
        "--card",
        metavar="FILE",
        help="instead draw the card of one run: what was trained and how, its curve, speed and sample",
    )
    add(
        "--usd_per_gpu_hour",
        type=number(0, 10**6),
        metavar="USD",
        help="price of a process's GPU for an hour, for the card",
    )
    return parser


def card(args: argparse.Namespace, runs: Sequence[ReportedRun]) -> int:
    """Draw the card of one run. Raises ProblemsError for a refusal; return the exit code."""
    from launch.console.new_output import new_file
    from launch.records.card import draw_card

    if len(runs) != 1:
        raise ProblemsError.of(
            "--card",
            f"--card of {counted(len(runs), 'run')}",
            "a card is of one run",
            "name one",
        )
    (run,) = runs
    out = new_file("--card", args.card, (".png",))
    draw_card(run.records, run.result, out, args.usd_per_gpu_hour)
    say(f"{out}: {run.title}, {run.status}")
    for problem in run.problems:
        say(problem, sys.stderr)
    return 1 if run.problems else 0


def report(args: argparse.Namespace, folder: Path) -> int:
    """Check the flags, read tables and runs, write the report and return the exit code.

    Raises ValueError for every refusal, before anything is written.
    """
    if not (args.runs or args.table or args.all):
        raise ValueError(
            "nothing to report: name run directories, as in launch/report.py runs, or --table NAME, or --all "
            "(see --help)"
        )
    # matplotlib and torch take seconds to load: not before --help and the commonest mistake.
    from launch.reports import document, writing
    from launch.reports.runs import find, labels, read_run
    from launch.reports.tables import Tables

    tables = Tables(folder)
    looked_up: list[Any] = []
    problems: list[Problem] = []
    for look_up, asked in ((tables.named, args.table), (find, args.runs)):
        try:
            looked_up.append(look_up(asked))
        except ProblemsError as error:
            problems += error.problems
    if problems:
        raise ProblemsError(problems)
    names, paths = looked_up
    run_labels = labels(paths)
    chosen = writing.default_directory(names, run_labels, args.all)
    directory = path_of(args.out, "--out") if args.out else chosen
    former = writing.check(directory)
    runs = []
    for path, label in zip(paths, run_labels, strict=True):
        runs.append(read_run(path, label, tables.recipe))
    if args.card:
        return card(args, runs)
    names += tables.published() if args.all else []
    made = document.assemble(
        tables,
        names,
        runs,
        only_named=bool(args.table) and not args.all,
        over=args.over,
    )
    files = writing.write(made, directory)
    _print_summary(made, directory, files, former)
    return 1 if made.problems else 0


def _print_summary(
    made: ReportDocument, directory: Path, files: Sequence[Path], former: Sequence[str]
) -> None:
    for section in made.sections:
        say(f"{section.table.name}: {section.summary}")
    if made.comparison:
        say(f"compared: {', '.join(run.label for run in made.comparison.runs)}")
        for line in (*made.comparison.remarks, *made.comparison.findings):
            say(f"  {line}")
    for note in made.notes:
        say(note)
    sizes = ", ".join(
        f"{path.name} ({path.stat().st_size / 1e3:,.0f} kB)" for path in files
    )
    say(f"{directory}: {sizes}" + ("; a former report was replaced" if former else ""))
    if made.problems:
        say("\n  ".join(["\ncould not be read:", *made.problems]), sys.stderr)


if __name__ == "__main__":
    ends.run(main)
