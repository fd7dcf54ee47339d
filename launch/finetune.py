"""Fine-tune a BERT on a task by transformers' Trainer, predict its splits and score them.

deepspeed launch/finetune.py --task sst2 --init RUN
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if not __package__:
    import _clone_first  # noqa: F401

from ds_configs.findings import find
from launch.console import arguments, ends
from launch.experiments.launching import torchrun
from launch.records.facts import Ending, RunFacts, TaskScore
from launch.training.start import (
    RUN_RULES,
    add_run_arguments,
    job_of,
    launch,
    plan_of,
    say_on_rank_0,
)
from recipes.catalog import cut_to
from recipes.problems import Problem, ProblemsError
from recipes.schema import Task
from recipes.tasks import SPLITS, TASKS

if TYPE_CHECKING:
    from data.corpus import Corpus
    from launch.training.early_ends import EarlyStop
    from launch.training.job import Job
    from launch.training.run import Start

EXAMPLES = """\
examples:
  deepspeed launch/finetune.py --task sst2 --init runs/bert-sotu-zero1
      a pretraining run on SST-2 of the hub (nyu-mll/glue); scores,
      predictions and checkpoints in runs/finetune-sst2-zero1
  python launch/finetune.py --task rte --init ./bert-base \\
      --train train.jsonl --dev dev.jsonl
      what save_pretrained wrote, on files with the hub's fields: JSON lines,
      or a JSON list
  python launch/finetune.py --task rte --init ./bert-base --from_scratch \\
      --train train.jsonl --dev dev.jsonl
      the control: the same shape and vocabulary, weights drawn at random
  deepspeed --num_gpus 4 launch/finetune.py --task mnli --init RUN \\
      --ds_config zero3
      several GPUs: ZeRO 0 to 3 and offload; ZeRO-3 cuts a model that is too
      large for one
  python launch/finetune.py --task squad1 --init RUN --seeds 5 --ensemble \\
      --out runs/squad
      five seeds, their median and ensemble; the same command goes on where it
      was interrupted
  python launch/finetune.py --task sst2 --init RUN --lr 1e-5 --epochs 10 \\
      --set dropout.attention=0 --plan
      the resolved plan of it, with settings of the recipe changed; nothing is
      started

files: --train and --dev together take the place of the hub's data set; --test
is optional, and its labels may be hidden. GLUE's own TSV, SQuAD's own JSON and
RACE's own directories are read too. A record without a text or a label is left
out and counted, but in --test predicted; a wrong one is refused.
what comes out: result.json has the scores of every split;
RUN/predictions/SPLIT has the files of the task's submission and the logits;
RUN/checkpoints/checkpoint-N is loaded by from_pretrained.
To stop and to resume: as launch/pretrain.py, with Ctrl-C and --resume, on as
many processes and with the same --ds_config.
exit codes: 0 done or stopped on request, 1 failed, 2 refused before anything
was started, 3 diverged,
4 a rank hung,
6 trained and saved, but not all was recorded."""

SEVERAL = "--seeds, --ensemble"
RULES = (
    *RUN_RULES,
    ("--plan", SEVERAL, "a plan is that of one run"),
    ("--ensemble", "+--seeds", "the seeds' models answer together, 2 at least"),
    ("--ranks", f"+{SEVERAL}", "it is of several runs; deepspeed --num_gpus N starts one"),
    *(
        (flag, f"--set {key}", "both decide it")
        for flag, key in (
            ("--sequence_length", "sequence_length"), ("--batch", "batch.global"), ("--lr", "optimizer.lr"),
            ("--seed", "seed"), ("--epochs", "task.epochs"), ("--epochs", "steps"), ("--task", "task.name"),
            *((f"--{split}", f"task.{split}") for split in SPLITS),
        )
    ),
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES, RULES)
    add = parser.add_argument_group("what to train").add_argument
    positive = arguments.number(0, 10**6)
    names = ", ".join(
        f"{name}: {facts.title.split(',')[0]}" for name, facts in TASKS.items()
    )
    add("--task", required=True, choices=list(TASKS), metavar="TASK", help=names)
    init = "weights of the encoder, a run of this project or a BERT that save_pretrained wrote; heads are new"
    add("--init", required=True, metavar="DIR", help=init)
    arguments.add_weights_arguments(add)
    add(
        "--from_scratch",
        action="store_true",
        help="take only shape and vocabulary of --init, and draw all weights at random: the control",
    )
    for split in SPLITS:
        add(f"--{split}", metavar="FILE", help=Task.model_fields[split].description)
    add(
        "--sequence_length",
        type=arguments.whole(8, 10**6),
        metavar="N",
        help="tokens of a sample",
    )
    add(
        "--epochs",
        type=positive,
        default=3.0,
        metavar="X",
        help="over the training examples (default: 3)",
    )
    add(
        "--batch",
        type=arguments.whole(),
        metavar="N",
        help="samples of a step, over all processes",
    )
    add("--lr", type=positive, metavar="X", help="peak learning rate")
    add(
        "--seed",
        type=arguments.whole(0, 2**62),
        default=1234,
        metavar="N",
        help="of heads, order and dropout",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one field of the recipe, e.g. --set dropout.hidden=0; repeatable",
    )
    add(
        "--steps",
        type=arguments.whole(),
        metavar="N",
        help="end after N optimizer steps; the learning-rate schedule stays that of all epochs",
    )
    add_run_arguments(parser)
    several = parser.add_argument_group(
        "several runs, one after the other, each a process of its own below --out"
    ).add_argument
    several(
        "--seeds",
        type=arguments.whole(1, 1000),
        metavar="N",
        help="train with N seeds from --seed on, and report the median; those that are finished are kept",
    )
    several(
        "--ensemble",
        action="store_true",
        help="score the mean of the probabilities of all seeds, two at least, too",
    )
    several(
        "--ranks",
        type=arguments.whole(1, 10**4),
        default=1,
        metavar="N",
        help="processes of each run (default: 1)",
    )
    return parser


def main() -> None:
    args = build_parser().parse_args()
    several = bool(args.seeds or args.ensemble)
    check_flags(args, several)
    if several:
        several_runs(args)
    else:
        launch(args, lambda: checked(args))


def check_flags(args: argparse.Namespace, several: bool) -> None:
    """Refuse contradictory flags before any slow import. Raises ProblemsError."""
    from launch.evaluation.finetuning_seeds import MEMBERS
    from launch.ranks import processes

    problems = []
    if several and processes.launched():
        problems.append(
            Problem(
                "--seeds",
                "--seeds or --ensemble under a launcher",
                "each run starts its own processes",
                f"start it as python launch/finetune.py, with --ranks {processes.world_size()}",
            )
        )
    if args.ensemble and args.seeds < MEMBERS:
        problems.append(
            Problem(
                "--ensemble",
                f"--ensemble with --seeds {args.seeds}",
                f"the seeds' models answer together, {MEMBERS} at least",
                "add --seeds 5",
            )
        )
    if problems:
        raise ProblemsError(problems)


def several_runs(args: argparse.Namespace) -> None:
    """Run one seed after the other, median and ensemble. Exit with code 2 if the first would be refused."""
    from launch.console import terminal

    terminal.outlast_readers()
    out = arguments.directory("--out", args.out or f"runs/finetune-{args.task}-seeds")
    terminal.quiet_libraries()  # before the next line loads deepspeed
    from launch.evaluation import finetuning_seeds
    from launch.ranks import ending

    common = common_arguments(sys.argv[1:])
    try:
        checked(
            argparse.Namespace(
                **{**vars(args), "plan": True, "processes": args.ranks, "out": None}
            )
        )
        finetuning_seeds.keep_arguments(out, common)
    except ValueError as e:
        ending.refuse(e)
    launcher = torchrun(args.ranks)[1:] if args.ranks > 1 else []
    outcomes = []
    for seed in range(args.seed, args.seed + args.seeds):
        made = finetuning_seeds.run_seed(out, seed, [*launcher, __file__, *common])
        terminal.say(f"{made.name}: {made.problem or '; '.join(map(str, made.scores))}")
        outcomes.append(made)
    summary = finetuning_seeds.summarize(out, outcomes, average=args.ensemble)
    for split, metrics in summary.median.items():
        shown = ", ".join(
            f"{name.replace('_', ' ')} {value:.4f}" for name, value in metrics.items()
        )
        terminal.say(f"median of {split}: {shown}")
    for score in summary.ensemble:
        terminal.say(f"ensemble of {score.split}: {score}")
    few = len(summary.sound) < finetuning_seeds.MEMBERS
    if args.ensemble and few:
        terminal.say(
            f"no ensemble: {len(summary.sound)} of {args.seeds} seeds have scores"
        )
    terminal.say(f"{out}: {finetuning_seeds.SUMMARY} and the runs")
    if len(summary.sound) < args.seeds:
        raise SystemExit(1)


def common_arguments(typed: Sequence[str]) -> tuple[str, ...]:
    """Return the common arguments of all runs, without flags that differ per run or start several runs."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--ensemble", "--resume"):
        own.add_argument(flag, action="store_true")
    for flag in ("--seeds", "--ranks", "--out", "--seed"):
        own.add_argument(flag)
    return tuple(own.parse_known_args(typed)[1])


def checked(args: argparse.Namespace) -> Job:
    """Make the fine-tuning from the flags; the number of training examples decides its steps.

    Raises ValueError with every problem.
    """
    from data.tasks import corpus as task_corpus
    from launch.evaluation import pretrained
    from launch.evaluation.finetuning import checkpoints
    from launch.evaluation.finetuning_recipe import recipe_of
    from launch.machine import description
    from launch.weights.initial_weights import InitialWeights
    from launch.weights.starting_model import StartingModel

    machine = description.detect_machine(args.emulate_fp16)
    given = StartingModel(args.init, "--init", args.weights_args)
    of = (args, *pretrained.encoder_in(given), machine)
    first = recipe_of(*of)
    corpus = task_corpus.build(first, say_on_rank_0)
    original = recipe_of(*of, examples=len(corpus.train))
    weights = None
    if not args.from_scratch:
        weights = InitialWeights(args.init, stated=args.weights_args)
    recipe = cut_to(original, args.steps)
    config = args.ds_config or recipe.ds_config
    plan = plan_of(args, recipe, config, machine, weights)
    name = f"finetune/{args.task}"
    facts = RunFacts(plan, name, original=original, ds_config=find(config))
    job = job_of(args, facts, machine, weights)
    encoder = job.initial_weights and pretrained.pretrained_in(
        job.initial_weights.directory
    )
    scores: list[TaskScore] = []

    def loop(start: Start) -> EarlyStop | None:
        from launch.evaluation.finetuning import train

        return train(start, corpus, scores)

    def outcome(job: Job, _: Corpus) -> Ending:
        if encoder:
            pretrained.keep(job.directory, encoder)
        return Ending(task_scores=tuple(scores))

    return replace(
        job,
        corpus=lambda meeting: corpus,
        loop=loop,
        saved=checkpoints,
        outcome=outcome,
    )


if __name__ == "__main__":
    ends.run(main)
