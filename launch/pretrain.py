"""Pretrain one recipe under one DeepSpeed configuration.

deepspeed launch/pretrain.py --ds_config ds_configs/zero3_offload.json
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.text.given_text import text_settings
from ds_configs.findings import Disagreement
from ds_configs.following import Stated, notices
from ds_configs.jsonfile import ConfigError
from ds_configs.plan import ANY_GPU
from ds_configs.resolver import followed, resolve
from launch.console import arguments, ends
from launch.console.text_table import aligned
from launch.machine import abilities
from launch.ranks import joining, processes
from launch.ranks.meeting import Meeting
from launch.records.facts import Ending
from launch.records.plan_text import titled
from launch.training.start import RUN_RULES, Training, add_run_arguments, job_of, launch, say_on_rank_0
from recipes import catalog
from recipes.problems import Problem, ProblemsError

if TYPE_CHECKING:
    from data.corpus import Corpus

EXAMPLES = """\
examples:
  deepspeed launch/pretrain.py --ds_config ds_configs/zero3_offload.json
      the default recipe: a small GPT-2 on the packaged corpus, about three
      minutes on two CPU cores
  deepspeed --num_gpus 2 launch/pretrain.py \\
      --ds_config ds_configs/zero2.json --tiny
      two processes, on GPUs or on a CPU, with the recipe shrunk to seconds
  torchrun --nproc_per_node 8 launch/pretrain.py \\
      --ds_config ds_configs/3d.json --recipe parallel_kinds/3d
      2 x 2 x 2 tensor, pipeline and data parallel
  srun --ntasks-per-node 4 python launch/pretrain.py --ds_config zero1 \\
      --out $SCRATCH/run --resume
      in a job of Slurm, one process a task; docs/running.md has mpirun, and
      several nodes without Slurm
  python launch/pretrain.py --recipe bert/sotu --text my_folder/
      your own text: a file, a directory or a glob of JSON lines, parquet or
      plain text, compressed or not
  python launch/pretrain.py --init_from my_gpt2 --text my.jsonl
      go on from weights of transformers, Megatron or a run: shape, positions
      and vocabulary are theirs
  python launch/pretrain.py --follow my_deepspeed.json
      batch, optimizer, clipping, schedule and precision as that JSON states
      them, each in a line of the plan
  python launch/pretrain.py --plan --processes 64 \\
      --recipe openwebtext/gpt2-124m
      the plan of 64 processes, checked on a laptop; nothing is started
  python launch/pretrain.py --ds_config bf16 --set optimizer.lr=3e-4 \\
      --steps 100 --out runs/try1
      one process, one field of the recipe changed
  deepspeed launch/pretrain.py --ds_config ds_configs/zero3_offload.json \\
      --resume
      continue from the newest complete checkpoint; a first start if there is
      none

to stop: Ctrl-C, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGHUP (not under nohup)
or `touch <run directory>/STOP` finish the step, save and exit 0. (The
deepspeed and torchrun launchers report 1 when a signal reaches them; with the
STOP file they report 0.) result.json then has the status "interrupted", and
--resume goes on. SIGQUIT ends at once and leaves stacks-rank-N.txt.
exit codes: 0 done or stopped on request, 1 failed, 2 refused before anything
was started, 3 diverged,
4 a rank hung (run.hang_after),
5 numbers changed by themselves (run.check_every),
6 trained and saved, but not all was recorded: the last lines say what."""


def build_parser() -> argparse.ArgumentParser:
    rules = (
        ("--list", "*", "it lists the recipes and ends"),
        ("--weights_args", "+--init_from", "it is about the weights in --init_from"),
        ("--new_vocabulary", "+--init_from", "it is about the weights in --init_from"),
        ("--follow", "--ds_config, --set ds_config", "both name the DeepSpeed JSON"),
        *arguments.TEXT_RULES,
        *RUN_RULES,
    )
    parser = arguments.command((__doc__ or "").split("\n\n")[0], EXAMPLES, rules)
    arguments.add_recipe_arguments(parser, text=True)
    parser.add_argument("--list", action="store_true", help="list the recipes and exit")
    follow = (
        "DeepSpeed JSON as --ds_config, whose batch, optimizer, clipping, schedule and precision the recipe "
        "takes, with DeepSpeed's defaults beside an optimizer"
    )
    parser.add_argument("--follow", metavar="FILE", help=follow)
    keep = add_run_arguments(parser)
    given = (
        "start from the weights in DIR instead of random ones, with their shape, positions and tokenizer: a "
        "run or one of its checkpoints, or a GPT-2 or BERT of transformers or Megatron"
    )
    keep.add_argument("--init_from", metavar="DIR", help=given)
    arguments.add_weights_arguments(keep.add_argument)
    insist = "train the weights in --init_from with another vocabulary than theirs: the loss starts high"
    keep.add_argument("--new_vocabulary", action="store_true", help=insist)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    if args.list:
        print(aligned(catalog.titles().items()))
        return
    launch(args, lambda: training_of(args))


def training_of(args: argparse.Namespace) -> Training:
    """Make the training of the flags. Raises ValueError with every problem."""
    laid = dict[str, Any]()
    weights = None
    if args.text is not None:
        laid |= text_settings(args.text, arguments.stated(args.set, "data.text_column"))
    if args.init_from is not None:
        from launch.weights.starting_model import StartingModel

        named = args.recipe if "recipe" in args.given else None
        weights = StartingModel(
            args.init_from, stated=args.weights_args, recipe=named, insists=args.new_vocabulary
        )
        args.recipe = weights.recipe_name
        laid |= weights.settings(args.set)
    taken = list[Stated]()
    if args.follow is not None:
        args.ds_config = args.follow
        degrees = [text for text in args.set if text.strip().startswith("parallel")]
        unfollowed = catalog.load(args.recipe, degrees, args.tiny, args.steps)
        anywhere = args.plan and not processes.launched()
        world = args.processes if anywhere else processes.world_size()
        taken = followed(unfollowed, args.follow, world)
        laid |= {each.key: each.value for each in taken}
    original = catalog.load(args.recipe)
    recipe = titled(catalog.load(args.recipe, args.set, args.tiny, args.steps, laid), original)
    if recipe.task is not None:
        fix = f"python launch/finetune.py --task {recipe.task.name} --init DIR"
        raise ProblemsError([Problem("task", "a recipe with a task", "pretraining has none", fix)])
    name = catalog.full_name(args.recipe) + ("-tiny" if args.tiny else "")
    with contextlib.suppress(ValueError):  # `job_of` tells it, with the problems of this machine
        plan = resolve(recipe, args.ds_config or recipe.ds_config, processes.world_size(), ANY_GPU)
        joining.order_kernels(plan.layout.tp)
    machine = abilities.detect_machine(args.emulate_fp16, on_paper=args.plan)
    try:
        job = job_of(args, recipe, name, machine, weights)
    except ConfigError as refused:
        disagrees = any(isinstance(problem, Disagreement) for problem in refused.problems)
        if args.follow is not None or not disagrees:
            raise
        came = f"--follow {args.ds_config} instead of --ds_config"
        hint = Problem("--follow", came, "the recipe takes what the JSON states")
        raise ConfigError([*refused.problems, hint]) from None
    if taken:
        said = notices(taken, unfollowed, recipe, Path(args.follow).name)
        job = replace(job, plan=replace(job.plan, notices=(*said, *job.plan.notices)))

    def corpus(meeting: Meeting) -> Corpus:
        from data.corpus import build

        return build(job.plan.recipe, job.cache, say=say_on_rank_0, once=meeting.once)

    def outcome(corpus: Corpus) -> Ending:
        from launch.training.sample import sample

        return Ending(sample=sample(job.plan.recipe, job.checkpoints, corpus.tokenizer))

    return Training(job, original, args.tiny, machine.emulated_fp16, corpus, outcome=outcome)


if __name__ == "__main__":
    ends.run(main)
