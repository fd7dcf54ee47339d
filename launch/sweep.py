"""Measure a recipe over values of its fields or its layout: a short run for each combination.

python launch/sweep.py --tiny --sweep batch.micro=1,2,4
"""

from __future__ import annotations

import argparse
import signal

from launch.console import arguments, ends, new_output, output, quiet, terminal
from recipes import catalog
from recipes.problems import Problem, ProblemsError

EXAMPLES = """\
examples:
  python launch/sweep.py --tiny --sweep batch.micro=1,2,4 \\
      --sweep model.heads=2,4
      six runs of 20 steps, each a process of its own
  python launch/sweep.py --recipe dgx2_gpt2_model_parallel/72x3072-h32-tp8 \\
      --sweep model.heads=8,16,24,32
      the study of heads of a document, beside its printed points, on 16 GPUs
  python launch/sweep.py --recipe openwebtext/gpt2-124m \\
      --sweep batch.micro=largest --sweep activation_checkpointing=none,full
      the largest micro-batch that this GPU holds, without and with
      recomputation: doubled until memory ends, then bisected
  python launch/sweep.py --sweep ds_config=zero1,zero2,zero3 --processes 2
      configurations; parallel.tp, parallel.pp and parallel.dp are swept alike

Where batch.micro or a degree of parallelism is swept and batch.global is not
set, the micro-batch is held, and the global batch follows; where parallel.tp
or parallel.pp is swept, the other processes are data-parallel.
A point that runs out of memory, diverges or is refused is a line of the
table, and the others go on. The same command goes on where it was
interrupted, and runs no point again that has its outcome; further values may
be added. OUT has a run directory for each point (launch/report.py reads
them), sweep.md, sweep.csv and sweep.png, a plot over the field swept first,
beside the rows of the recipe's published table that differ in the swept
fields alone.
exit codes: 0 every point has its outcome (out of memory is one), 1 some
failed otherwise, 2 refused, nothing started."""

STEPS = 20  # by default
SHARED = ("recipe", "set", "tiny", "steps", "ds_config", "processes")  # by all points of a directory


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command((__doc__ or "").split("\n\n")[0], EXAMPLES)
    swept = "a field and its values, e.g. model.heads=8,16,32, or batch.micro=largest; repeatable"
    parser.add_argument("--sweep", action="append", required=True, metavar="KEY=VALUES", help=swept)
    arguments.add_recipe_arguments(parser)
    add = parser.add_argument
    config = "DeepSpeed JSON of all points (default: the recipe's own)"
    add("--ds_config", metavar="FILE", help=config)
    ranks = "processes of each point (default: as many as its layout needs)"
    add("--processes", type=arguments.whole(most=4096), metavar="N", help=ranks)
    add("--out", metavar="DIR", help="where runs and tables are kept (default: runs/sweep-<recipe>-<fields>)")
    return parser


def main() -> int:
    args = build_parser().parse_args()
    quiet.quiet_libraries()
    # They load torch, DeepSpeed and matplotlib, which no --help should wait for.
    from launch.evaluation.finetuning_runs import ARGUMENTS, keep_arguments
    from launch.experiments.sweeps import lines, points
    from launch.machine import abilities
    from launch.ranks import processes
    from launch.reports.tables import load

    if processes.launched():
        came, rule = f"{processes.world_size()} started by a launcher", "each point starts its own"
        raise ProblemsError([Problem("processes", came, rule, "python launch/sweep.py --processes N")])
    settings = (*args.set, *([f"ds_config={args.ds_config}"] if args.ds_config else ()))
    swept = points.swept_keys(args.sweep, settings)
    grows = any(points.LARGEST in values for values in swept.values())
    if grows and not processes.device().own_memory:
        rule = "its memory is the whole machine's, and where it ends, the system ends any program"
        raise ProblemsError([Problem("--sweep", f"{points.LARGEST} on a CPU", rule, "name values")])
    own = {setting.partition("=")[0].strip() for setting in settings}
    steps = STEPS if args.steps is None and "steps" not in own else args.steps
    base = catalog.load(args.recipe, settings, tiny=args.tiny, steps=steps)
    table, row = catalog.find(args.recipe)
    out = output.directory("--out", args.out or output.run_directory(f"sweep-{row}", "-".join(swept)))
    if not (out / ARGUMENTS).exists():
        new_output.new_directory("--out", out, ", or that of a sweep to go on with")
    machine = abilities.detect_machine()
    sweep = points.Sweep(args.recipe, base, swept, settings, args.tiny, steps, args.processes, machine, out)
    first = [sweep.point(values) for values in sweep.combinations(largest="1")]
    if all(point.refused for point in first):
        raise ProblemsError(problem for point in first for problem in point.refused)
    common = [f"{key}={value}" for key, value in sorted(vars(args).items()) if key in SHARED]
    keep_arguments(out, common)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, it ends the ranks, too
    terminal.outlast_readers()
    measured = list(sweep.run())
    every = [*measured, *lines.published_lines(load(table), catalog.load(args.recipe), tuple(swept))]
    lines.write(every, tuple(swept), base.title, out)
    print(f"\n{lines.as_text(every, tuple(swept), terminal.columns())}")
    terminal.say(f"\n{out}: sweep.md, sweep.csv, sweep.png, and the runs")
    return int(any(line.status not in points.OUTCOMES + ("refused",) for line in measured))


if __name__ == "__main__":
    ends.run(main)
