"""Train layouts under every release of DeepSpeed that we have seen, and compare each with the pinned one.

PYTHONPATH=. python tests/workers/deepspeed_versions.py --out versions
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launch.console import arguments, ends, terminal
from launch.console.text_table import table
from launch.deepspeed_fixes.versions import SEEN
from launch.experiments.launching import ROOT, run_and_wait
from launch.experiments.parity.layout_cases import FORCED, REFERENCE, RUN
from launch.experiments.proving.versions import environments
from launch.records.metrics import read_metrics
from recipes import catalog

ABOUT = """\
Install each release of DeepSpeed but the pinned one, which is there, in a
folder of its own, and compare layouts with one process under it. A release agrees
when every layout does, and one process has the losses and norms of the pinned
release within 1e-4 (in half precision 1e-2). Ops are compiled once for each release."""
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
HEADINGS = ("release", "layouts", "loss", "grad norm", "agrees")
# difference of one process under two releases: of the loss, and relative of the norm
MOST = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}


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
    recipe = catalog.load(args.recipe, [*FORCED, *args.set], tiny=True)  # refuses what it cannot be
    most = MOST[recipe.precision]
    out = Path(args.out).absolute()
    pinned = run_of(args, SEEN[-1], out)
    rows = []
    for release in reversed(args.releases):
        rows.append(row_of(release, pinned, run_of(args, release, out), most))
        terminal.say(" ".join(rows[-1]))
    print(table(rows, HEADINGS, "lrrrl"))
    return int(any(row[-1] != "yes" for row in rows))


def run_of(args: argparse.Namespace, release: str, out: Path) -> Path:
    """Return what `compare_layouts.py` left under a release; it is run first unless that is there."""
    name = "-".join([args.recipe, *args.set]).replace("/", "-")
    runs = out / name / release
    code = Path(f"{runs}.code")
    if not code.exists():
        terminal.say(f"training under DeepSpeed {release}")
        runs.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "launch/compare_layouts.py"), "--tiny", "--recipe", args.recipe]
        command += ["--steps", str(args.steps), "--out", str(runs)]
        command += [f"--set={setting}" for setting in args.set]
        chosen = [] if release == SEEN[-1] else [f"deepspeed={release}"]
        for _ in environments(chosen, out):
            ended = run_and_wait([*command, "--only", *args.only], Path(f"{runs}.txt"))
        code.write_text(str(ended))
    return runs


def row_of(release: str, pinned: Path, found: Path, most: float) -> tuple[str, ...]:
    """Return the release's row: whether its layouts agree, how far one process is from the pinned release's."""
    agree = Path(f"{found}.code").read_text() == "0"
    layouts = "agree" if agree else f"do not: {found}.txt"
    curves = [
        found / REFERENCE.folder / RUN / "metrics.jsonl",
        pinned / REFERENCE.folder / RUN / "metrics.jsonl",
    ]
    if not all(curve.exists() for curve in curves):
        return release, layouts, *"--", "NO"
    own, expected = (read_metrics(curve).steps for curve in curves)
    pairs = [*zip(own, expected, strict=True)]
    loss = max(abs(one.loss - other.loss) for one, other in pairs)
    norm = max(abs(one.grad_norm / other.grad_norm - 1) for one, other in pairs)
    agrees = agree and max(loss, norm) <= most
    return release, layouts, f"{loss:.1e}", f"{norm:.1e}", "yes" if agrees else "NO"


if __name__ == "__main__":
    ends.run(main)
