"""Train layouts under every release of DeepSpeed that we have seen, and compare each with the pinned one.

PYTHONPATH=. python tests/workers/deepspeed_versions.py --out versions
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launch.console import arguments, ends, terminal
from launch.console.text_table import table
from launch.deepspeed_fixes.versions import SEEN
from launch.experiments.launching import ROOT, run_and_wait
from launch.experiments.parity.comparison import RunOutcome, compare, read_outcome
from launch.experiments.parity.layout_cases import CASES, FORCED, REFERENCE
from launch.experiments.proving.versions import environments
from recipes import catalog
from recipes.schema import Recipe

ABOUT = """\
Install each release of DeepSpeed but the pinned one, which is there, in a
folder of its own, and train layouts with launch/compare_layouts.py. A release agrees when every layout, the
one-process run among them, agrees with the same layout of the pinned release,
by the rule of compare_layouts.py. Ops are compiled once for each release."""
EXAMPLES = """\
examples, with PYTHONPATH=. in the environment:
  python tests/workers/deepspeed_versions.py --out versions
      every release, about two minutes of computing for each
  python tests/workers/deepspeed_versions.py --out versions --recipe bert/sotu \\
      --releases 0.19.7 0.19.8
      another recipe; what is installed or trained there already is kept
  python tests/workers/deepspeed_versions.py --out versions --set precision=bf16
      another precision
exit codes: 0 all agree, 1 some do not or failed, 2 refused."""
# ZeRO 0 to 3 with and without offload, tensor and pipeline parallelism, on at most two processes
LAYOUTS = (
    *("own accumulation", "tp2", "tp2 zero3", "pp2", "dp2 zero0", "dp2 zero1"),
    *("dp2 zero2", "dp2 zero3", "dp2 zero2 offload", "dp2 zero3 offload"),
)
HEADINGS = ("release", "layouts", "loss", "grad norm", "gradients", "weights", "agrees")


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(ABOUT, EXAMPLES)
    add = parser.add_argument
    add("--out", metavar="DIR", required=True, help="of installations and runs")
    every = "default: all that were seen to agree"
    add("--releases", nargs="+", choices=SEEN, default=SEEN, metavar="RELEASE", help=every)
    recipe = "trained with --tiny (default: %(default)s)"
    add("--recipe", default=catalog.DEFAULT_RECIPE, metavar="TABLE/ROW", help=recipe)
    setting = "override one field of the recipe; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    layouts = "of launch/compare_layouts.py --list (default: ten)"
    add("--only", nargs="+", default=LAYOUTS, metavar="LAYOUT", help=layouts)
    add("--steps", type=arguments.whole(), default=8, metavar="N", help="default: 8")
    return parser


def main() -> int:
    """Print a row for each release as it is there; return 1 where one does not agree."""
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    arguments.directory("--out", args.out)
    recipe_of(args)  # refuses what it cannot be, before anything is trained
    out = Path(args.out).absolute()
    pinned = outcomes(args, SEEN[-1], out)
    rows = []
    for release in reversed(args.releases):
        rows.append(row_of(release, pinned, outcomes(args, release, out)))
        terminal.say(" ".join(rows[-1]))
    print(table(rows, HEADINGS, "lrrrrrl"))
    return int(any(row[-1] != "yes" for row in rows))


def outcomes(args: argparse.Namespace, release: str, out: Path) -> list[RunOutcome]:
    """Return what every layout came to under a release; trained first unless its runs are there."""
    name = "-".join([args.recipe, *args.set]).replace("/", "-")
    runs = out / name / release
    if not runs.exists():
        runs.parent.mkdir(parents=True, exist_ok=True)
        train(args, release, out, runs)
    found = []
    for case in (REFERENCE, *CASES):
        if case is REFERENCE or case.name in args.only:
            # of the products, which decides as that of weights
            if recipe_of(args).precision != "fp32":
                case = replace(case, states="bf16")
            log = Path(f"{runs}.txt")
            found.append(read_outcome(case, runs / case.folder, log))
    return found


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe that is trained. Raises ProblemsError."""
    return catalog.load(args.recipe, [*FORCED, *args.set], tiny=True)


def train(args: argparse.Namespace, release: str, out: Path, runs: Path) -> None:
    """Run `compare_layouts.py` under a release; its output goes to a file."""
    terminal.say(f"training under DeepSpeed {release}")
    script = str(ROOT / "launch" / "compare_layouts.py")
    command = [sys.executable, script, "--tiny", "--recipe", args.recipe]
    command += ["--steps", str(args.steps), "--out", str(runs)]
    command += [f"--set={setting}" for setting in args.set]
    chosen = [] if release == SEEN[-1] else [f"deepspeed={release}"]
    for _ in environments(chosen, out):
        run_and_wait([*command, "--only", *args.only], Path(f"{runs}.txt"))


def row_of(release: str, pinned: Sequence[RunOutcome], found: Sequence[RunOutcome]) -> tuple[str, ...]:
    """Return the release's row: layouts that agree, the largest differences, the verdict."""
    pairs = zip(pinned, found, strict=True)
    differences = [compare(before, after) for before, after in pairs]
    agreeing = sum(each.agrees for each in differences)
    counts = f"{agreeing} of {len(differences)}"
    bad = [each for each in differences if not each.agrees]
    if bad:
        why = bad[0].failure or bad[0].diverging or "the loss or the norm"
        last = why.splitlines()[-1]
        return release, counts, *"----", f"NO, {bad[0].run.name}: {last}"
    columns = ("loss", "norm", "gradient", "weight")
    largest = [max(getattr(each, name) for each in differences) for name in columns]
    return release, counts, *(f"{each:.1e}" for each in largest), "yes"


if __name__ == "__main__":
    ends.run(main)
