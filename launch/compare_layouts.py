"""Train one recipe under one process and under every parallel layout that fits, and compare what came out.

python launch/compare_layouts.py --tiny
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":  # replace launch/, which would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds_configs.jsonfile import ConfigError
from ds_configs.plan import Plan
from ds_configs.resolver import resolve
from launch.console import arguments, quiet
from launch.machine import abilities, ending
from launch.machine.processes import device_limit, rank, start_processes
from launch.parity.comparison import COMPILED, Outcome, compare, read_outcome, table
from recipes import catalog
from recipes.schema import Recipe

EXAMPLES = """\
examples:
  python launch/compare_layouts.py --tiny
      the default recipe, shrunk, under every layout of up to 8 processes (several share one CPU core)
  python launch/compare_layouts.py --tiny --processes 2 --only tp2 pp2
      two layouts
  python launch/compare_layouts.py --tiny --compile
      adds each layout with compiled layers, and what compiling gains

Every run is in fp32 without dropout, and with optimizer.eps=1e-6, since with 1e-8 Adam turns the rounding noise of gradients
that are zero in exact arithmetic (the key biases) into full steps. A layout agrees when every step's loss is within 1e-4 of
the one-process run and every gradient norm within 1e-4 of it, relatively.
exit codes: 0 all agree, 1 some do not or failed, 2 refused."""

FORCED = (
    "precision=fp32",
    "dropout.hidden=0",
    "dropout.attention=0",
    "optimizer.eps=1e-6",
    "run.save_last=true",
)


@dataclass(frozen=True)
class LayoutCase:
    """One way to run the recipe. `settings` are overrides of the recipe that must not change its numbers."""

    name: str
    tp: int
    pp: int
    dp: int
    ds_config: str
    accumulation: int = 1
    checkpointing: str = "none"
    compiled: bool = False

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp


REFERENCE = LayoutCase("one process", 1, 1, 1, "zero0")
CASES = (
    LayoutCase("accumulation 4", 1, 1, 1, "zero0", accumulation=4),
    LayoutCase("recomputed", 1, 1, 1, "zero1", checkpointing="full"),
    LayoutCase("recomputed by 2", 1, 1, 1, "zero3", checkpointing="2"),
    LayoutCase("tp2", 2, 1, 1, "zero0"),
    LayoutCase("tp2 accumulation 4, recomputed", 2, 1, 1, "zero1", accumulation=4, checkpointing="full"),
    LayoutCase("tp2 zero3", 2, 1, 1, "zero3"),
    LayoutCase("pp2", 1, 2, 1, "pipeline"),
    LayoutCase("pp2 accumulation 4", 1, 2, 1, "pipeline", accumulation=4),
    LayoutCase("pp2 accumulation 4, recomputed", 1, 2, 1, "pipeline", accumulation=4, checkpointing="full"),
    LayoutCase("dp2 zero0", 1, 1, 2, "zero0"),
    LayoutCase("dp2 zero1", 1, 1, 2, "zero1"),
    LayoutCase("dp2 zero2", 1, 1, 2, "zero2"),
    LayoutCase("dp2 zero3", 1, 1, 2, "zero3"),
    LayoutCase("dp2 zero2 offload", 1, 1, 2, "zero2_offload"),
    LayoutCase("dp2 zero3 offload", 1, 1, 2, "zero3_offload", accumulation=4),
    LayoutCase("tp2 dp2 zero1", 2, 1, 2, "zero1"),
    LayoutCase("tp2 dp2 zero2", 2, 1, 2, "zero2", accumulation=4),
    LayoutCase("tp2 dp2 zero3", 2, 1, 2, "zero3"),
    LayoutCase("tp2 dp2 zero3 offload, recomputed", 2, 1, 2, "zero3_offload", checkpointing="full"),
    LayoutCase("pp2 dp2", 1, 2, 2, "pipeline", accumulation=4),
    LayoutCase("tp2 pp2", 2, 2, 1, "3d", accumulation=4),
    LayoutCase("tp2 pp2 recomputed", 2, 2, 1, "3d", checkpointing="full"),
    LayoutCase("tp4", 4, 1, 1, "zero1"),
    LayoutCase("tp2 pp2 dp2", 2, 2, 2, "3d", accumulation=4),
)


def main() -> None:
    args = build_parser().parse_args()
    if args.worker:
        work(Path(args.worker))
        return
    cases = chosen_cases(args)
    if args.list:
        print("\n".join(f"{c.name:<36} {c.processes} processes, {c.ds_config}" for c in cases))
        return
    quiet.quiet_libraries()
    if args.out and Path(args.out).exists() and any(Path(args.out).iterdir()):
        ending.refuse(
            f"--out {args.out} is not empty, and runs are never overwritten or mixed: name a new directory"
        )
    try:
        recipe = catalog.load(args.recipe, [*FORCED, *args.set], tiny=args.tiny)
        recipe = recipe.model_copy(update={"steps": args.steps or 20})
    except ValueError as e:
        ending.refuse(e)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(args.out or temporary)
        outcomes = run_cases(recipe, [REFERENCE, *cases], out)
    rows = [compare(outcomes[0], outcome) for outcome in outcomes[1:]]
    print("\n" + table(outcomes[0], rows))
    raise SystemExit(0 if all(row.agrees for row in rows) else 1)


def build_parser():
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    arguments.add_recipe_arguments(parser)
    parser.add_argument(
        "--processes", type=int, default=8, metavar="N", help="largest number of processes (default: 8)"
    )
    parser.add_argument("--only", nargs="+", metavar="LAYOUT", help="these layouts alone, by name")
    parser.add_argument("--list", action="store_true", help="list the layouts and exit")
    parser.add_argument("--compile", action="store_true", help="also run every layout with compiled layers")
    parser.add_argument(
        "--out", metavar="DIR", help="keep the run directories there (default: removed at the end)"
    )
    parser.add_argument(
        "--worker", help="internal: run the jobs of this file on the processes of this launch"
    )
    return parser


def chosen_cases(args) -> list[LayoutCase]:
    names = [c.name for c in CASES]
    unknown = [name for name in args.only or [] if name not in names]
    if unknown:
        ending.refuse(f"--only {', '.join(unknown)}: no such layout; there are: {', '.join(names)}")
    processes = min(args.processes, device_limit() or args.processes)
    cases = [c for c in CASES if (not args.only or c.name in args.only) and c.processes <= processes]
    if processes < args.processes:
        print(
            f"this machine has {processes} devices: layouts of more processes are left out (--processes {args.processes})"
        )
    if args.compile:
        cases = [*cases, *(replace(c, name=c.name + COMPILED, compiled=True) for c in [REFERENCE, *cases])]
    return cases


def run_cases(recipe: Recipe, cases: Sequence[LayoutCase], out: Path) -> list[Outcome]:
    """Run every case; those with the same number of processes share one launch, since starting takes longer than training."""
    outcomes = {}
    for processes in sorted({c.processes for c in cases}):
        group = [c for c in cases if c.processes == processes]
        log = launch(recipe, group, processes, out)
        for case in group:
            outcomes[case.name] = read_outcome(case.name, case.processes, out / slug(case.name), log)
    return [outcomes[c.name] for c in cases]


def launch(recipe: Recipe, cases: Sequence[LayoutCase], processes: int, out: Path) -> Path:
    """One launch of `processes` ranks that runs the cases one after another; returns its log."""
    out.mkdir(parents=True, exist_ok=True)
    jobs, log = out / f"jobs-{processes}.json", out / f"log-{processes}.txt"
    (out / "recipe.yaml").write_text(catalog.dump(recipe))
    jobs.write_text(json.dumps([vars(c) for c in cases]))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        __file__,
    ]
    print(
        f"{processes} process{'es' if processes > 1 else ''}: {'; '.join(c.name for c in cases)}", flush=True
    )
    with log.open("w") as file:
        subprocess.run([*command, "--worker", str(jobs)], stdout=file, stderr=subprocess.STDOUT, check=False)
    return log


def work(jobs: Path) -> None:
    """The ranks of one launch: every case in turn, in the same process group."""
    quiet.quiet_libraries()
    out = jobs.parent
    recipe = catalog.load_resolved(out / "recipe.yaml")
    machine = abilities.detect_machine()
    with ending.clean_exit():
        start_processes()
        for case in (LayoutCase(**c) for c in json.loads(jobs.read_text())):
            run_case(recipe, case, out / slug(case.name), machine)


def case_plan(recipe: Recipe, case: LayoutCase, machine) -> Plan:
    """The plan of the recipe under the case's layout, with the same global batch."""
    micro = recipe.batch.global_ // (case.dp * case.accumulation)
    settings = {
        "parallel": recipe.parallel.model_copy(update={"tp": case.tp, "pp": case.pp, "dp": case.dp}),
        "batch": recipe.batch.model_copy(update={"micro": micro, "accumulation": case.accumulation}),
        "activation_checkpointing": int(case.checkpointing)
        if case.checkpointing.isdigit()
        else case.checkpointing,
    }
    return resolve(recipe.model_copy(update=settings), case.ds_config, case.processes, machine)


def run_case(recipe: Recipe, case: LayoutCase, directory: Path, machine) -> None:
    """Train one case. A refused one leaves its reason; a failing one ends the launch with its traceback in the log."""
    from data.corpus import build
    from launch.runs.directory import RunDirectory
    from launch.runs.recorder import Report, Silence
    from launch.training.job import Job
    from launch.training.run import train
    from modeling.parallel.process_grid import ProcessGrid

    try:
        plan = case_plan(recipe, case, machine)
    except ConfigError as e:
        if rank() == 0:
            directory.mkdir(parents=True)
            (directory / "refused.txt").write_text(str(e))
        return
    job = Job(plan, case.name, directory, compiled=case.compiled, record_gradients=True)
    report = Silence()
    if rank() == 0:
        opened = RunDirectory.create(directory, plan, name=case.name, command=sys.argv, resume=False)
        report = Report(job, opened, original=recipe, tiny=False, emulated=False, progress=False)
    with report:
        corpus = build(recipe, say=report.say)
        report.start(corpus)
        train(job, report, corpus, ProcessGrid(case.tp, case.pp, case.dp))
        report.finish("ok")


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


if __name__ == "__main__":
    main()
