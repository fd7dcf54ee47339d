"""Pretrain one recipe under one DeepSpeed configuration.

deepspeed launch/pretrain.py --ds_config ds_configs/zero3_offload.json
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

if not __package__:
    import _clone_first  # noqa: F401

from ds_configs.findings import ConfigError, Disagreement, find
from ds_configs.resolver import tensor_degree
from launch.console import arguments, ends
from launch.console.text_table import aligned
from launch.machine import description
from launch.ranks import joining, processes
from launch.records.facts import Ending, RunFacts
from launch.records.titles import texts, title_of
from launch.training.start import (
    RUN_RULES,
    add_run_arguments,
    job_of,
    launch,
    plan_of,
    say_on_rank_0,
    text_of,
)
from modeling import cost
from recipes import catalog
from recipes.files import checked, path_of
from recipes.problems import Problem, ProblemsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from data.corpus import Corpus
    from launch.checkpoints.branching import BranchPoint
    from launch.records.recorded_run import RecordedRun
    from launch.training.followed_json import FollowedJson
    from launch.training.job import Job
    from launch.weights.adoption import Adoption
    from launch.weights.starting_model import StartingModel
    from recipes.catalog import NamedRecipe
    from recipes.schema import Recipe

# parameters; rank 0 assembles no larger model for a sample
LARGEST_SAMPLED = 2_000_000_000
OF_ADOPTED = "it is about the run in --adopt"
EXAMPLES = """\
examples:
  deepspeed launch/pretrain.py --ds_config ds_configs/zero3_offload.json
      the default recipe: a small GPT-2 on the packaged corpus, three to ten
      minutes on two CPU cores
  deepspeed --num_gpus 2 launch/pretrain.py \\
      --ds_config ds_configs/zero2.json --tiny
      two processes, on GPUs or on a CPU, with the recipe shrunk to seconds
  deepspeed --num_gpus 8 launch/pretrain.py \\
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
      and vocabulary are theirs, and the learning rate is that of given weights
  python launch/pretrain.py --adopt my_trainer/checkpoint-500 --out runs/mine
      go on from a DeepSpeed run of transformers' GPT-2 or BERT, with moments,
      step and schedule; says what its files do not, and shows a whole line
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
  deepspeed --num_gpus 2 launch/pretrain.py --resume --out runs/try1 \\
      --set parallel.tp=2 --ds_config zero3
      continue a run with its own recipe, --set's and JSON, here under another
      layout; --resume --out RUN is enough where nothing changes
  python launch/pretrain.py --resume --out runs/try1 --ds_config zero2 --plan
      what a resume changes, before it does
  python launch/pretrain.py --recipe runs/try1 --out runs/try2
      a new run of the recipe and JSON of another run
  python launch/pretrain.py --branch runs/stable@1000 --out runs/cooled-1000 \\
      --set schedule.kind=wsd --set schedule.wsd_decay_steps=200 \\
      --set steps=1200
      go on from a checkpoint of another run with another schedule, learning
      rate, batch or text, or longer samples; here a cool-down of 200 steps,
      whose end is the branch's unless schedule.decay_steps is given

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
        ("--weights_args", "+--init_from, --adopt", "it is about what they hold"),
        ("--new_vocabulary", "+--init_from", "it is about the weights in --init_from"),
        ("--branch", "+--out", "a branch is a run of its own"),
        (
            "--branch",
            "--recipe, --init_from, --tiny",
            "a branch has the recipe and the weights of its run",
        ),
        ("--adopt", "+--out", "the adopted run is a run of its own"),
        (
            "--adopt",
            "--init_from, --branch, --follow, --tiny",
            "its files decide weights, shape and settings",
        ),
        ("--data_from", "+--adopt", OF_ADOPTED),
        ("--adopt_optimizer", "+--adopt", OF_ADOPTED),
        ("--regroup", "+--adopt", OF_ADOPTED),
        ("--follow", "--ds_config, --set ds_config", "both name the DeepSpeed JSON"),
        (
            "--epochs",
            "--set steps, --branch, --adopt, --follow",
            "both say how long the training is",
        ),
        *arguments.TEXT_RULES,
        *RUN_RULES,
    )
    parser = arguments.command(__doc__, EXAMPLES, rules)
    arguments.add_recipe_arguments(parser, text=True)
    epochs = (
        "train for so many epochs of the text, instead of the recipe's steps; the learning-rate schedule ends "
        "with them"
    )
    number = arguments.number(0, 10**6)
    parser.add_argument("--epochs", type=number, metavar="X", help=epochs)
    parser.add_argument("--list", action="store_true", help="list the recipes and exit")
    follow = (
        "DeepSpeed JSON as --ds_config, whose batch, optimizer, clipping, schedule and precision the recipe "
        "takes, with DeepSpeed's defaults beside an optimizer"
    )
    parser.add_argument("--follow", metavar="FILE", help=follow)
    add = add_run_arguments(parser)
    given = (
        "start from the weights in DIR instead of random ones, with their shape, positions and tokenizer: a "
        "run or one of its checkpoints, a model of transformers, or a GPT-2 or BERT of Megatron"
    )
    add("--init_from", metavar="DIR", help=given)
    arguments.add_weights_arguments(add)
    add(
        "--new_vocabulary",
        action="store_true",
        help="train the weights in --init_from with another vocabulary than theirs: the loss starts high",
    )
    add(
        "--branch",
        metavar="RUN[@STEP]",
        help="go on from the newest checkpoint of RUN, or from that of a STEP, as another run in --out: with "
        "weights, moments, step and place in the data, under RUN's recipe and what is changed of it",
    )
    arguments.add_adoption_arguments(add)
    return parser


def main() -> None:
    args = build_parser().parse_args()
    if args.list:
        print(aligned(catalog.titles().items()))
        return
    launch(args, lambda: checked_job(args))


@dataclass(frozen=True)
class Beginning:
    """What a run begins with: a row or a run by its recipe, another run's checkpoint, or another program's run.

    Attributes:
        named: the recipe that is changed.
        run: whose recipe it is; None: a row's.
        branch_point: the checkpoint of `run` that is gone on from.
        adoption: of another program's run.
        weights: given ones.
        shrinks: --tiny changes the recipe.
    """

    named: NamedRecipe
    run: RecordedRun | None
    branch_point: BranchPoint | None
    adoption: Adoption | None
    weights: StartingModel | None
    shrinks: bool

    @property
    def original(self) -> Recipe:
        return self.run.original if self.run else self.named.recipe

    @property
    def tiny(self) -> bool:
        return self.shrinks or (self.run is not None and self.run.tiny)

    @property
    def name(self) -> str:
        name = self.run.name if self.run else self.named.name
        return f"{name}-tiny" if self.tiny else name


def checked_job(args: argparse.Namespace) -> Job:
    """Make the job of the flags. Raises ValueError with every problem."""
    beginning = beginning_of(args)
    followed = followed_json(args, beginning) if args.follow else None
    recipe = recipe_of(args, beginning, followed)
    config = config_of(args, beginning, recipe)
    joining.order_kernels(tensor_degree(recipe, config))
    machine = description.detect_machine(args.emulate_fp16, on_paper=args.plan)
    try:
        plan = plan_of(args, recipe, config, machine, beginning.weights)
    except ConfigError as refused:
        raise with_hint(refused, args, config) from None
    adoption = beginning.adoption
    if adoption:
        from launch.training.schedule import learning_rate

        plan = adoption.with_remarks(plan, args.set, learning_rate)
    if followed:
        on_paper = args.plan and args.steps is None
        plan = followed.with_remarks(plan, on_paper=on_paper)
    facts = RunFacts(
        plan,
        beginning.name,
        original=beginning.original,
        tiny=beginning.tiny,
        ds_config=find(config),
        recipe_of=beginning.run.path if beginning.run else None,
    )
    job = job_of(args, facts, machine, beginning.weights)
    adopt = adoption.write if adoption else None
    stated = arguments.stated(args.set, "run.prompt") is not None
    return replace(job, adopt=adopt, outcome=partial(sampled, stated=stated))


def beginning_of(args: argparse.Namespace) -> Beginning:
    """Find what the flags begin with. Raises ProblemsError."""
    run, branch_point = source_of(args)
    named = run.named if run else catalog.find(args.recipe)
    if not run and named.of_run:
        run = run_of(named)
    adoption = None
    weights = None
    if run:
        weights = weights_of(run) if args.resume and not branch_point else None
    elif args.adopt is not None:
        from launch.weights.adoption import Adoption

        adoption = Adoption.of(args.adopt, args)
        named = adoption.named_recipe
    if args.init_from is not None:
        from launch.weights.starting_model import StartingModel

        chosen = args.recipe if "recipe" in args.given else None
        weights = StartingModel(
            args.init_from,
            stated=args.weights_args,
            recipe=run.path if run else chosen,
            insists=args.new_vocabulary,
        )
        named = weights.named_recipe
    shrinks = args.tiny and not (run and run.tiny)
    return Beginning(named, run, branch_point, adoption, weights, shrinks)


def recipe_of(
    args: argparse.Namespace, beginning: Beginning, followed: FollowedJson | None
) -> Recipe:
    """Return the recipe of the run, with what is given and --set over it. Raises ProblemsError."""
    settings = text_of(args)
    if args.init_from is not None and beginning.weights:
        weights = beginning.weights
        settings |= weights.settings(args.set) | weights.rate(args.set)
    if followed:
        settings |= followed.settings
    if beginning.branch_point:
        recipe = beginning.branch_point.recipe(args.set, settings, args.steps)
    elif beginning.adoption:
        recipe = beginning.adoption.begun(args.set, settings, args.steps)
    else:
        change = partial(
            beginning.named.changed,
            tiny=beginning.shrinks,
            settings=settings,
            trained=not (followed and args.plan),  # else the plan tells it
        )
        overrides = args.set
        if args.epochs is not None:
            from launch.training.epochs import steps_of

            steps = steps_of(change(args.set), args.epochs, say_on_rank_0)
            overrides = [*args.set, f"steps={steps}"]
        recipe = change(overrides, steps=args.steps)
    if recipe.task is not None:
        raise ProblemsError.of(
            "task",
            "a recipe with a task",
            "pretraining has none",
            f"python launch/finetune.py --task {recipe.task.name} --init DIR",
        )
    return recipe.model_copy(update={"title": title_of(recipe)})


def config_of(args: argparse.Namespace, beginning: Beginning, recipe: Recipe) -> str:
    """Return the DeepSpeed JSON of the run: the flags' one, that of the run that goes on, or the recipe's."""
    given = args.follow or args.ds_config
    if beginning.run and not (given or arguments.stated(args.set, "ds_config")):
        given = beginning.run.ds_config
    config: str = given or recipe.ds_config
    return beginning.adoption.with_scaling(config) if beginning.adoption else config


def with_hint(
    refused: ConfigError, args: argparse.Namespace, config: str
) -> ConfigError:
    """Name --follow, too, where the JSON says otherwise than the recipe."""
    disagrees = any(isinstance(problem, Disagreement) for problem in refused.problems)
    if args.follow is not None or not disagrees:
        return refused
    came = f"--follow {config} instead of --ds_config"
    hint = Problem("--follow", came, "the recipe takes what the JSON states")
    return ConfigError([*refused.problems, hint])


def sampled(job: Job, corpus: Corpus, *, stated: bool) -> Ending:
    """Make the sample, on other text than the row's by its first words, unless the prompt was `stated`."""
    recipe = job.plan.recipe
    own = job.facts.original or recipe
    prompt = recipe.run.prompt
    other = texts(recipe.data) != texts(own.data)
    if prompt and prompt == own.run.prompt and other and not stated:
        run = recipe.run.model_copy(update={"prompt": corpus.opening()})
        recipe = recipe.model_copy(update={"run": run})
    try:
        return Ending(sample=sample(recipe, job.checkpoints, corpus.tokenizer))
    except (ValueError, FloatingPointError) as why:
        return Ending(no_sample=f"not sampled: {why}")


def sample(
    recipe: Recipe, checkpoints: Path, tokenizer: PreTrainedTokenizerFast
) -> str | None:
    """Return the final weights' continuation of run.prompt, or fillings of its masks; None without a prompt.

    Raises ValueError or FloatingPointError: why there is none.
    """
    from data.text.vocabulary import unused_numbers
    from launch.checkpoints import run_checkpoints
    from launch.checkpoints.stored import StoredTensors
    from modeling.generation import continue_prompt, fill_prompt, in_transformers

    if recipe.run.prompt is None:
        return None
    if cost.parameters(recipe.model, recipe.positions) > LARGEST_SAMPLED:
        raise ValueError(f"more than {LARGEST_SAMPLED:,} parameters")
    saved = run_checkpoints.newest(checkpoints)
    if saved is None or saved.step < recipe.steps:
        lacks = "there is no checkpoint of the last step (run.save_last=false)"
        raise ValueError(f"{lacks}; --set run.save_last=true keeps one")
    answer = fill_prompt if recipe.model.facts.masked else continue_prompt
    stored = StoredTensors(saved.directory, saved.manifest)
    model = in_transformers(recipe, stored, tokenizer=tokenizer)
    never = unused_numbers(tokenizer, recipe.model.vocab_size)
    return answer(model, tokenizer, recipe.run.prompt, recipe.seed, never)


def source_of(
    args: argparse.Namespace,
) -> tuple[RecordedRun | None, BranchPoint | None]:
    """Return the run that is resumed or branched off from, and the checkpoint that a branch begins from."""
    run = resumed_run(args)
    if run:
        return run, None
    if args.branch is not None:
        from launch.checkpoints.branching import BranchPoint

        point = BranchPoint.of(args.branch)
        arguments.check_outside("--out", args.out, point.run.path)
        return point.run, point
    return None, None


def followed_json(args: argparse.Namespace, beginning: Beginning) -> FollowedJson:
    """Read the JSON of --follow. Raises ConfigError."""
    from launch.training.followed_json import FollowedJson

    degrees = [text for text in args.set if text.strip().startswith("parallel")]
    unfollowed = beginning.named.changed(degrees, beginning.shrinks, args.steps)
    anywhere = args.plan and not processes.launched()
    world = args.processes if anywhere else processes.world_size()
    return FollowedJson.read(args.follow, unfollowed, world)


def resumed_run(args: argparse.Namespace) -> RecordedRun | None:
    """Return the run that --resume --out continues with its own recipe; None: none, or --recipe says it.

    Raises ProblemsError: --branch names another checkpoint than the run went on from, or the run was killed
    while another program's was adopted.
    """
    if (
        not (args.resume and args.out)
        or "recipe" in args.given
        or not catalog.recorded(args.out)
    ):
        return None
    from launch.checkpoints.run_checkpoints import named
    from launch.records.recorded_run import RecordedRun

    run = RecordedRun.read(path_of(args.out, "--out"), "--out")
    began = run.recipe.branch
    if began and not (catalog.recorded(began.run) or named(run.path / "checkpoints")):
        if args.adopt:
            return None
        again = ("launch/checkpoint.py", "adopt", began.run, "--out", str(run.path))
        raise ProblemsError.of(
            "--resume",
            f"{run.path} was to go on with {began.run}, and its first checkpoint was never whole",
            "it holds nothing yet",
            f"adopt it again: python {shlex.join(run.command or again)}",
        )
    if args.branch is not None:
        from launch.checkpoints import branching

        path, step = branching.split(args.branch)
        if began is None or began.run != str(path) or step not in (None, began.step):
            came = f"--branch {args.branch} with --resume, and {run.path} is "
            came += f"a branch of {began}" if began else "no branch"
            raise ProblemsError.of(
                "--branch",
                came,
                "a run began once",
                "leave --branch out to resume it, or name another directory with --out",
            )
    return run


def run_of(named: NamedRecipe) -> RecordedRun:
    """Read the run that --recipe names. Raises ProblemsError: it is a branch."""
    from launch.records.recorded_run import RecordedRun

    began = named.recipe.branch
    if began is not None:
        raise ProblemsError.of(
            "--recipe",
            f"{named.name} is a branch of {began}",
            "a new run begins at step 0",
            f"begin another one with --branch {began.run}@{began.step}, or take --recipe {began.run}",
            where=f"--recipe {named.name}",
        )
    return RecordedRun.of(named)


def weights_of(run: RecordedRun) -> StartingModel | None:
    """Return the initial weights of a run that has no checkpoint yet; None: it needs none."""
    from launch.checkpoints.run_checkpoints import newest

    said = run.initial_weights
    if said is None or newest(run.path / "checkpoints"):
        return None
    from launch.weights.starting_model import StartingModel

    weights: StartingModel = checked(
        TypeAdapter(StartingModel), {**said, "recipe": run.path}, run.path
    )
    return weights


if __name__ == "__main__":
    ends.run(main)
