"""The start of a training run from flags: check, join the ranks, train; rank 0 keeps the records."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_configs.findings import Notice, lookup
from ds_configs.plan import Machine, Plan
from launch.checkpoints.run_checkpoints import CheckpointChoice, first_whole, found
from launch.console import arguments, terminal
from launch.machine import checks, description
from launch.ranks import ending, joining, processes
from launch.ranks.meeting import Meeting
from launch.records.facts import Ending, Entropies, RunFacts, SilentRecorder
from launch.training.early_ends import Diverged, EarlyEnd, stacks_at_quit
from launch.training.job import (
    WISHES,
    InitialWeights,
    Job,
    assumed_machine,
    compiles,
    eager_seconds,
    plan_job,
)
from recipes.files import path_of
from recipes.problems import (
    ProblemsError,
    system_error,
    system_problem,
    take_file_handles,
)
from recipes.schema import Recipe

if TYPE_CHECKING:
    from data.corpus import Corpus
    from launch.records.directory import RunDirectory
    from modeling.parallel.process_grid import ProcessGrid

RUN_RULES = (
    ("--plan", "--deterministic", "a plan computes nothing"),
    (
        "--processes",
        "+--plan",
        "it plans on paper, and a launcher decides how many are started",
    ),
)
NOT_RECORDED = 6  # exit code of a training that is saved, of which not all was recorded
PREPARATION = timedelta(days=2)  # the longest preparation of a corpus
# cuBLAS and NCCL read them when they start. cuBLAS promises equal results only with this workspace
# (https://docs.nvidia.com/cuda/cublas, "Results reproducibility"); a ring has one order of summation.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


def add_run_arguments(parser: argparse.ArgumentParser) -> arguments.AddArgument:
    """Add the flags of every run, how to run it and where it is kept; return what adds to the second group."""
    add = parser.add_argument_group("how to run it").add_argument
    config = "DeepSpeed JSON, as a path or the bare name of one in ds_configs/ (default: the recipe's own)"
    add("--ds_config", metavar="FILE", help=config)
    compiled = "use torch.compile; auto (default): where the run is long enough to pay that back"
    add(
        "--compile",
        nargs="?",
        choices=WISHES,
        const="on",
        default="auto",
        help=compiled,
    )
    emulated = (
        "let a CPU run fp16, to exercise the loss scaler: slow, and said in the results"
    )
    add("--emulate_fp16", action="store_true", help=emulated)
    same = "use kernels that give the same bits in every run on GPUs too; an error where there is none"
    add("--deterministic", action="store_true", help=same)
    plan = (
        "check everything, show the plan (without a launcher: of all processes it needs) and what the machines "
        "lack, and exit"
    )
    add("--plan", action="store_true", help=plan)
    planned = "with --plan: of N processes, on machines like this one, or on GPUs where it cannot train the row"
    add("--processes", type=arguments.whole(most=10**6), metavar="N", help=planned)
    add = parser.add_argument_group("where it is kept").add_argument
    add(
        "--out",
        metavar="DIR",
        help="run directory (default: runs/<recipe>-<ds_config>)",
    )
    resume = "continue from the newest complete checkpoint of the run directory"
    add("--resume", action="store_true", help=resume)
    return add


def launch(args: argparse.Namespace, check: Callable[[], Job]) -> None:
    """Train a checked job, or show its plan; `args` has the flags of `add_run_arguments`.

    `check`: makes the checked job on every rank; raises ValueError with every problem.
    """
    terminal.outlast_readers()
    joining.postpone_collections()
    meeting = joining.meet(lambda: check_processes(args), args.out)
    job = meeting.all_or_none(check)
    if args.plan:
        from launch.training import plan_checks

        show_plan(job, plan_checks.of_machines(job, meeting))
        meeting.end()
        return
    with joining.joined(
        meeting,
        job.plan.layout.tp,
        admit=lambda: admit_run(job, meeting),
        note_failure=lambda text: ending.keep_error(job.directory, text),
    ) as directory:
        if args.deterministic:
            demand_determinism()
        run(job, directory, meeting)


def demand_determinism() -> None:
    """Have torch use deterministic kernels alone, before the device is used; others raise RuntimeError.

    Variables set by the user stay.
    """
    import torch

    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    # with warn_only, attention's backward pass would not be
    torch.use_deterministic_algorithms(True)
    # Our code reads no unwritten memory, and filling all memory first takes longer than the step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def admit_run(job: Job, meeting: Meeting) -> RunDirectory | None:
    """Open the run directory on rank 0, and check that every rank sees it. Collective."""
    directory = meeting.all_or_none(lambda: open_run_directory(job))
    if processes.world_size() > 1:
        from launch.ranks.watchdog import flight_recorder
        from launch.records import shared_directory

        os.environ.update(flight_recorder(os.environ, job.directory))
        shared_directory.check_all(meeting, job.directory)
    return directory


def check_processes(args: argparse.Namespace) -> None:
    """Refuse --processes where a launcher decides. Raises ProblemsError."""
    came = f"--processes {args.processes}"
    key = "--processes"
    world = processes.world_size()
    if args.processes and processes.launched() and args.processes != world:
        came = f"{came} with {world} that a launcher started"
        raise ProblemsError.of(
            key, came, "a launcher decides it", "leave --processes out"
        )


def text_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a given text; {} without one."""
    if args.text is None:
        return {}
    from data.text.given_text import text_settings

    column = arguments.stated(args.set, "data.text_column")
    return text_settings(args.text, column, say_on_rank_0)


def plan_of(
    args: argparse.Namespace,
    recipe: Recipe,
    config: str,
    machine: Machine,
    weights: InitialWeights | None = None,
) -> Plan:
    """Plan a recipe under a DeepSpeed JSON by the flags of `add_run_arguments`; `weights`: initial ones.

    Raises ValueError with every problem of recipe and configuration.
    """
    take_file_handles(checks.files_needed(processes.world_size(), processes.rank()))
    plan = plan_job(
        recipe,
        config,
        machine,
        compiled=args.compile == "on",
        initial_weights=weights,
        elsewhere=args.plan and not processes.launched(),
        planned=args.processes,
    )
    if recipe.model.config:
        from launch.training import model_trial

        plan = replace(plan, notices=(*plan.notices, model_trial.check(recipe)))
    return plan


def job_of(
    args: argparse.Namespace,
    facts: RunFacts,
    machine: Machine,
    weights: InitialWeights | None = None,
) -> Job:
    """Make the job of a plan and of the flags of `add_run_arguments`. Raises ValueError.

    `facts`: of the plan, the recipe and the JSON; those of machine, directory and weights are added.
    """
    # Now, since a run that still trains there may save newer ones later.
    weights = weights and weights.resolved()
    plan = facts.plan
    text = getattr(args, "text", None)
    place = f"{facts.name}-{Path(text).stem}" if text else facts.name
    directory = (
        path_of(args.out, "--out")
        if args.out
        else arguments.run_directory(place, plan.ds_name)
    )
    if args.out and processes.rank() == 0:
        arguments.directory("--out", directory)
    compiled, why_not = compiles(args.compile, plan, machine)
    if why_not is not None:
        say_on_rank_0(why_not, terminal.warn)
    if args.plan and args.resume and processes.rank() == 0:
        plan = with_resume(plan, directory)
    facts = replace(
        facts,
        plan=plan,
        machine=description.describe() if processes.rank() == 0 else {},
        emulated_fp16=machine.emulated_fp16,
        initial_weights=weights.record() if weights else None,
        seconds=eager_seconds(plan, machine),
        recipe_of=None if facts.recipe_of == directory else facts.recipe_of,
    )
    return Job(
        facts, directory, resume=args.resume, compiled=compiled, initial_weights=weights
    )


def with_resume(plan: Plan, directory: Path) -> Plan:
    """Add notices of what a resume would change; nothing is changed. Raises ValueError: it is refused."""
    from launch.records.admission import foresee

    whole, _ = first_whole(found(directory / "checkpoints"))
    goes_on, *changed = foresee(directory, plan, whole.step if whole else None)
    first = Notice("resume", goes_on, differs=False)
    others = (Notice("resume", text) for text in changed)
    return replace(plan, notices=(first, *others, *plan.notices))


def open_run_directory(job: Job) -> RunDirectory | None:
    """Open the run directory on rank 0. Raises ValueError where this rank cannot start there."""
    from launch.records.admission import admit
    from launch.records.directory import curve_of

    make_quick_checks(job)
    if processes.rank() != 0:
        return None
    logs_to_wandb = lookup(job.plan.ds, "wandb.enabled")
    if logs_to_wandb:
        from launch.records import wandb_run

        wandb_run.check(job.directory)
    whole, damaged = first_whole(job.saved(job.checkpoints))
    newest = whole.step if whole else None
    lost = [(each.directory, each.why) for each in damaged]
    how = (job.directory, job.facts, sys.argv)
    with system_refusals(job.directory):
        curve_of(job.facts)  # a broken one is refused now
        directory = admit(*how, resume=job.resume, newest=newest, damaged=lost)
        if logs_to_wandb:
            wandb_run.keep_id(directory.path)
    # before this rank joins the others: none of them computes yet
    ending.forget_errors(directory.path)
    return directory


def make_quick_checks(job: Job) -> None:
    """Make the checks of every start; rank 0 prints warnings. Raises ProblemsError for what failed."""
    made = checks.run(checks.quick(job.plan.recipe, job.directory))
    checks.refuse(made)
    for check in made:
        if check.verdict == "warning":
            say_on_rank_0(f"{check.found}; {check.fix}", terminal.warn)


@contextlib.contextmanager
def system_refusals(place: Path) -> Iterator[None]:
    """Turn refusals of the operating system in the block into ProblemsError."""
    try:
        yield
    except OSError as error:
        told = system_error(error)
        if told:
            raise ProblemsError(
                [system_problem(told, place, "name another directory with --out")]
            ) from None
        raise


def show_plan(job: Job, made: list[checks.Check]) -> None:
    """Print on rank 0 the plan of the job, and what was found on the machines."""
    from data.text.held_out import describe_text
    from launch.records.directory import RunDirectory
    from launch.records.plan_text import NO_CURVE, Surroundings, describe_plan
    from launch.training import plan_checks

    if processes.rank() == 0:
        kernel = None
        recipe = job.plan.recipe
        text = describe_text(recipe) if recipe.task is None else None
        if job.plan.recipe.model.attention_window is not None:
            from launch.training.build_model import band_kernel

            kernel = band_kernel(job.plan)
        hardware = description.summary(job.facts.machine)
        if job.plan.layout.world != processes.world_size():
            hardware = assumed_machine(job.plan, hardware)
        watch = RunDirectory(job.directory).watch(job.facts)
        surroundings = Surroundings(
            hardware,
            band_kernel=kernel,
            run_directory=job.directory,
            recipe_of=job.facts.recipe_of,
            started=processes.world_size(),
            text=text,
            reference=watch or NO_CURVE,
            seconds=job.facts.seconds,
        )
        columns = terminal.columns()
        print(describe_plan(job.plan, job.facts.name, surroundings, columns))
        print(f"\n{plan_checks.text(made, columns)}")


def run(job: Job, directory: RunDirectory | None, meeting: Meeting) -> None:
    """Prepare data, show the plan, train and write results. `directory` is None except on rank 0."""
    import torch

    from launch.training import agreement
    from launch.training.loop import train
    from launch.training.run import Start
    from modeling import fusing
    from modeling.parallel.process_grid import ProcessGrid

    joining.resume_collections()
    clock = joining.StartClock()
    clock.mark("imports")
    layout = job.plan.layout
    grid = ProcessGrid(layout.tp, layout.pp, layout.dp, processes.TIMEOUT)
    # One process of a machine prepares a large corpus; the others may wait for hours.
    make = system_refusals(Path.cwd())(job.corpus or partial(build_corpus, job))
    corpus = meeting.all_or_none(lambda: make(meeting), PREPARATION)
    try:
        given = job.initial_weights
        failure = agreement.kernel_failure(grid.control_group)
        if failure:
            why = "nothing is compiled for the GPU, torch's own kernels run"
            say_on_rank_0(f"{why}: {failure}", terminal.warn)
            fusing.give_up()
            job = replace(job, compiled=False)
        start_weights = given.directory if given else None
        own = agreement.facts(job.plan, corpus, start_weights, job.compiled)
        meeting.compare(own, agreement.check)
        if job.adopt:
            from launch.training.run import checksum

            write = partial(job.adopt, job.plan, job.checkpoints, checksum(corpus))
            meeting.all_or_none(system_refusals(job.directory)(write), PREPARATION)
        # once, before the records are cut back to it
        chosen = choose_checkpoint(job, grid, corpus)
    except ValueError as e:
        ending.refuse(e)
    clock.mark("data")
    with system_refusals(job.directory):
        opened = open_recorder(job, directory, corpus, chosen, clock)
    with (
        opened as recorder,
        stacks_at_quit(job.directory / f"stacks-rank-{processes.rank()}.txt"),
    ):
        try:
            begun = Start(job, recorder, corpus, grid, chosen.checkpoint, meeting)
            stopped = (job.loop or train)(begun)
        except EarlyEnd as e:
            reason = None if isinstance(e, Diverged) else e.why
            recorder.finish(
                Ending(e.status, reason, agreement.peak_memory(grid.control_group))
            )
            ending.explain(e)
            # rank 0 has printed the reason
            torch.distributed.barrier(group=grid.control_group)
            raise SystemExit(e.code) from None
        except (RuntimeError, MemoryError) as e:
            said = ending.out_of_memory_said_by(e)
            # Another rank's end may cause this error: that rank has left its traceback before.
            because = (
                f"rank {processes.rank()}: {said}"
                if said
                else ending.out_of_memory_reason(job.directory)
            )
            if because:
                recorder.finish(Ending("OOM", because))
            raise
        peaks = agreement.peak_memory(grid.control_group)
        if stopped:
            recorded = recorder.finish(Ending("interrupted", peaks=peaks), str(stopped))
        else:
            ended = Ending()
            if directory:
                with recorder.keeping("the sample or the scores"):
                    ended = job.outcome(job, corpus)
            recorded = recorder.finish(replace(ended, peaks=peaks))
        if not processes.agreed(recorded, min, grid.control_group):
            raise SystemExit(NOT_RECORDED)


def build_corpus(job: Job, meeting: Meeting) -> Corpus:
    """Make the training data of the recipe. Collective. Raises ValueError or OSError."""
    from data.corpus import build

    return build(job.plan.recipe, say=say_on_rank_0, once=meeting.once)


def choose_checkpoint(job: Job, grid: ProcessGrid, corpus: Corpus) -> CheckpointChoice:
    """Choose the checkpoint that a resume or a branch goes on from, if any. Collective. Raises ValueError."""
    from launch.training.run import checksum

    recipe = job.plan.recipe
    chosen = CheckpointChoice(None)
    if job.loop is not None:
        if job.resume:
            chosen = first_whole(job.saved(job.checkpoints))
    elif job.resume or job.adopt:
        from launch.checkpoints import reading

        with system_refusals(Path.cwd()):
            chosen = reading.choose(job.checkpoints, grid, recipe, checksum(corpus))
    if recipe.branch is not None and chosen.checkpoint is None:
        from launch.checkpoints import branching

        with system_refusals(Path(recipe.branch.run)):
            chosen = branching.choose(recipe, grid, checksum(corpus))
    return chosen


def say_on_rank_0(text: str, say: Callable[[str], None] = terminal.say) -> None:
    if processes.rank() == 0:
        say(text)


def open_recorder(
    job: Job,
    directory: RunDirectory | None,
    corpus: Corpus,
    chosen: CheckpointChoice,
    clock: joining.StartClock,
) -> SilentRecorder:
    """Open rank 0's recorder, cut back to the chosen checkpoint; other ranks get a silent one."""
    from launch.records import vocabulary
    from launch.records.recorder import Recorder
    from launch.training.build_model import band_kernel

    if directory is None:
        return SilentRecorder()
    vocabulary.keep(directory.path, corpus.tokenizer)
    entropies = Entropies(corpus.uniform_entropy, corpus.unigram_entropy)
    known = replace(
        job.facts,
        data=corpus.summary,
        entropies=entropies,
        band_kernel=band_kernel(job.plan),
    )
    done = chosen.checkpoint.step if chosen.checkpoint else 0
    began = "resumed from"
    branch = job.plan.recipe.branch
    if branch is not None and done == branch.step:
        from launch.records import metrics

        began = "adopted as" if job.adopt else "branched off from"
        metrics.begin_branch(directory.metrics_jsonl, branch)
    recorder = Recorder(directory, known, done, clock, sys.stdout)
    for newer in chosen.damaged:
        recorder.warn(f"{newer}; it is left as it is, and an older checkpoint is taken")
    if chosen.checkpoint:
        recorder.say(f"{began} {chosen.checkpoint.directory}")
    return recorder
