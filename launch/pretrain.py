"""Pretrain one recipe under one DeepSpeed configuration.

deepspeed launch/pretrain.py --ds_config ds_configs/zero3_offload.json
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # replace launch/, which would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from ds_configs.resolver import resolve
from launch.console import arguments, quiet
from launch.machine import abilities, ending, out_of_memory, processes
from launch.training import initial_weights
from launch.training.job import Job
from recipes import catalog

EXAMPLES = """\
examples:
  deepspeed launch/pretrain.py --ds_config ds_configs/zero3_offload.json
      the default recipe: a small GPT-2 on the packaged corpus, about three minutes on two CPU cores
  deepspeed --num_gpus 2 launch/pretrain.py --ds_config ds_configs/zero2.json --tiny
      two processes, on GPUs or on a CPU, with the recipe shrunk to seconds
  torchrun --nproc_per_node 8 launch/pretrain.py --ds_config ds_configs/3d.json --recipe parallel_kinds/3d
      2 x 2 x 2 tensor, pipeline and data parallel
  python launch/pretrain.py --ds_config ds_configs/bf16.json --set optimizer.lr=3e-4 --steps 100 --out runs/try1
      one process, one field of the recipe changed
  deepspeed launch/pretrain.py --ds_config ds_configs/zero3_offload.json --resume
      go on from the newest complete checkpoint; a first start if there is none

to stop: Ctrl-C, SIGTERM or `touch <run directory>/STOP` finish the step, save and exit 0. (The deepspeed and torchrun
launchers themselves report 1 when a signal reaches them; with the STOP file they report 0.)
exit codes: 0 done or stopped on request, 1 failed, 2 refused before anything was started, 3 training diverged."""


def build_parser():
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    arguments.add_recipe_arguments(parser)
    parser.add_argument("--list", action="store_true", help="list the recipes and exit")
    how = parser.add_argument_group("how to run it")
    how.add_argument("--ds_config", metavar="FILE", help="DeepSpeed JSON, as a path or the bare name of one in ds_configs/ "
                     "(default: the recipe's own)")  # fmt: skip
    how.add_argument("--compile", action="store_true", help="use torch.compile and print the measured gain")
    how.add_argument("--emulate_fp16", action="store_true", help="let a CPU run fp16, to exercise the loss scaler: slow, and "
                     "said in the results")  # fmt: skip
    how.add_argument("--plan", action="store_true", help="check everything, show the resolved plan and exit")
    keep = parser.add_argument_group("where it is kept")
    keep.add_argument("--out", metavar="DIR", help="run directory (default: runs/<recipe>-<ds_config>)")
    keep.add_argument(
        "--resume", action="store_true", help="go on from the newest complete checkpoint of the run directory"
    )
    keep.add_argument("--init_from", metavar="DIR", help="start from the weights of a transformers GPT-2 or "
                      "BERT in DIR instead of random ones")  # fmt: skip
    return parser


def main() -> None:
    args = build_parser().parse_args()
    if args.list:
        print(arguments.list_recipes())
        return
    quiet.quiet_libraries()
    job, original, machine = checked_job(args)
    if args.plan:
        show_plan(job)
        return
    directory = open_run_directory(job) if processes.rank() == 0 else None
    with ending.clean_exit(lambda text: ending.keep_error(job.directory, text)):
        processes.start_processes()
        run(job, directory, original=original, tiny=args.tiny, emulated=machine.emulated_fp16)


def checked_job(args):
    """The job that the flags ask for; every problem of recipe and configuration is printed at once, with exit code 2."""
    from launch.runs.directory import default_path

    try:
        recipe = catalog.load(args.recipe, args.set, tiny=args.tiny, steps=args.steps)
        machine = abilities.detect_machine(args.emulate_fp16)
        plan = resolve(recipe, args.ds_config or recipe.ds_config, processes.world_size(), machine)
        if args.compile and recipe.model.implementation == "transformers":
            raise ValueError(
                "--compile with model.implementation=transformers: these rows run transformers' modules as their source did, uncompiled; "
                "leave --compile out, or --set model.implementation=megarecipes"
            )
        if args.init_from:
            initial_weights.check(args.init_from, recipe)
        check_sources(recipe)
        original = catalog.load(args.recipe)
    except ValueError as e:
        ending.refuse(e)
    name = catalog.full_name(args.recipe) + ("-tiny" if args.tiny else "")
    directory = Path(args.out) if args.out else default_path(name, plan.ds_name)
    job = Job(plan, name, directory, args.resume, args.compile, initial_weights=args.init_from)
    return job, original, machine


def check_sources(recipe) -> None:
    """Raises ValueError where files that the recipe names are not there."""
    from data.corpus import check_origin

    for origin in recipe.data.origins:
        check_origin(origin, recipe.model.family)


def open_run_directory(job: Job):
    from launch.runs.directory import RunDirectory, RunDirectoryError

    try:
        directory = RunDirectory.create(
            job.directory, job.plan, name=job.name, command=sys.argv, resume=job.resume
        )
    except RunDirectoryError as e:
        ending.refuse(e)
    out_of_memory.forget(
        directory.path
    )  # before this rank joins the others: none of them has begun to compute
    return directory


def show_plan(job: Job) -> None:
    from launch.machine import description
    from launch.planning.plan_text import describe_plan

    if processes.rank() == 0:
        print(
            describe_plan(
                job.plan,
                name=job.name,
                hardware=description.summary(description.describe()),
                run_directory=job.directory,
            )
        )


def run(job: Job, directory, **facts) -> None:
    """Data, plan on the screen, training, results. `directory` is None except on rank 0."""
    import torch

    from data.corpus import build
    from launch.runs import recorder
    from launch.training import agreement, engine
    from launch.training.run import train
    from modeling.parallel.process_grid import ProcessGrid

    layout = job.plan.layout
    report = recorder.Report(job, directory, **facts) if directory else recorder.Silence()
    with report:
        grid = ProcessGrid(layout.tp, layout.pp, layout.dp)
        try:
            corpus = build(job.plan.recipe, job.cache, say=report.say)
            agreement.check(job.plan, corpus, grid.control_group)
        except ValueError as e:
            ending.refuse(e)
        report.start(corpus)
        try:
            stopped = train(job, report, corpus, grid)
        except engine.Diverged as e:
            report.finish("diverged", memory=agreement.peak_memory(grid.control_group))
            ending.explain(e)
            torch.distributed.barrier(group=grid.control_group)  # rank 0 is not done before it has said why
            raise SystemExit(3) from None
        except (RuntimeError, MemoryError) as e:
            # Another rank's: it leaves its traceback before it ends, and its end is what this one stumbles over.
            if said := out_of_memory.said_by(e):
                report.finish("OOM", because=f"rank {processes.rank()}: {said}")
            elif said := out_of_memory.reason(job.directory):
                report.finish("OOM", because=said)
            raise
        report.finish(
            "interrupted" if stopped else "ok", stopped, memory=agreement.peak_memory(grid.control_group)
        )


if __name__ == "__main__":
    main()
