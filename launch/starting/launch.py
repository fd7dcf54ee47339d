"""One launch of a training run: every rank checks, meets the others, trains, and rank 0 keeps the records.

What a command trains on, and what it does with the trained model, is its `Work`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from launch.console import arguments, output, quiet, terminal
from launch.machine import abilities, checks, checkup, start_checks
from launch.machine.determinism import demand_determinism
from launch.ranks import ending, joining, launch_environment, orphans, out_of_memory, processes, start_up
from launch.ranks.meeting import Meeting
from launch.training import compile_choice
from launch.training.compile_choice import WISHES
from launch.training.job import InitialWeights, Job, assumed_machine, plan_job
from recipes.problems import Problem, ProblemsError
from recipes.refused_by_system import take_file_handles
from recipes.schema import Recipe

if TYPE_CHECKING:
    from data.corpus import Corpus
    from launch.checkpoints.reading import Choice
    from launch.records.directory import RunDirectory
    from launch.records.facts import RunFacts
    from launch.records.silence import Silence
    from launch.training.run import TrainingRun

DIVERGED = 3  # exit code
PREPARATION = timedelta(days=2)  # that a corpus may take


class Work(Protocol):
    """What a command adds to a launch."""

    def checked_job(self, args: argparse.Namespace) -> tuple[Job, Facts]:
        """The job that the flags ask for. Raises ValueError with every problem. On every rank."""

    def corpus(self, job: Job, meeting: Meeting) -> Corpus:
        """What the job trains on. Raises ValueError, or OSError. Collective."""

    def after_training(self, run: TrainingRun) -> None:
        """What follows the last step, with the engine still there. Collective."""

    def outcome(self, job: Job, directory: RunDirectory, corpus: Corpus) -> dict[str, Any]:
        """On rank 0, once training has ended well: the sample or the scores of the `Ending`."""


def add_run_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags that say how a run is made and where it is kept, whatever it trains; returns the latter."""
    how = parser.add_argument_group("how to run it")
    config = "DeepSpeed JSON, as a path or the bare name of one in ds_configs/ (default: the recipe's own)"
    how.add_argument("--ds_config", metavar="FILE", help=config)
    compiled = "use torch.compile, and print what it costs and saves; auto: where a run is long enough for it"
    how.add_argument(
        "--compile", nargs="?", choices=WISHES, const="on", default="auto", help=f"{compiled} (default: auto)"
    )
    emulated = "let a CPU run fp16, to exercise the loss scaler: slow, and said in the results"
    how.add_argument("--emulate_fp16", action="store_true", help=emulated)
    same = "use kernels that give the same bits in every run on GPUs too; an error where there is none"
    how.add_argument("--deterministic", action="store_true", help=same)
    plan = (
        "check everything, show the resolved plan (without a launcher: of as many processes as it asks for)"
    )
    how.add_argument("--plan", action="store_true", help=f"{plan} and exit")
    planned = (
        "with --plan: of N processes, on machines like this one, or on GPUs where it cannot train the row"
    )
    how.add_argument("--processes", type=arguments.whole(most=10**6), metavar="N", help=planned)
    keep = parser.add_argument_group("where it is kept")
    keep.add_argument("--out", metavar="DIR", help="run directory (default: runs/<recipe>-<ds_config>)")
    resume = "continue from the newest complete checkpoint of the run directory"
    keep.add_argument("--resume", action="store_true", help=resume)
    return keep


def launch(args: argparse.Namespace, work: Work) -> None:
    """Check what the flags ask for, and train it; `args` with those of `add_run_arguments`."""
    quiet.quiet_libraries()
    try:
        processes.check_launch(start=not args.plan)
        check_processes(args)
    except ValueError as e:
        ending.refuse(e)
    if args.plan:
        try:
            job, _ = work.checked_job(args)
        except ValueError as e:
            ending.refuse(e)
        show_plan(job)
        return
    start_up.keep_compiled_code()
    start_up.postpone_collections()
    take_file_handles(0)  # rank 0 has a connection to each rank, from the first meeting on
    if processes.launched():
        orphans.end_with_launcher()
    elif said := launch_environment.forgotten_srun(os.environ):
        terminal.say(said, sys.stderr)
    meeting = Meeting()
    joining.take_environment(meeting)
    job, facts = meeting.settle(lambda: work.checked_job(args))
    os.environ.update(launch_environment.wanted_by_tensor_parallelism(os.environ, job.plan.layout.tp))
    if processes.world_size() > 1:
        meeting.compare(meeting.settle(joining.own_place), processes.check_shared_devices)
    directory = meeting.settle(lambda: open_run_directory(job, facts))
    if processes.world_size() > 1:
        check_shared(job, meeting)
    with ending.clean_exit(lambda text: ending.keep_error(job.directory, text)):
        if args.deterministic:
            demand_determinism()
        processes.start_processes(store=meeting.store)
        run(job, directory, facts, meeting, work)


def check_processes(args: argparse.Namespace) -> None:
    """Raise ProblemsError where --processes says what a launcher decides."""
    if args.processes is None:
        return
    came, key = f"--processes {args.processes}", "--processes"
    if not args.plan:
        rule = "it plans on paper, and a launcher decides how many are started"
        fix = f"add --plan, or start with torchrun --nproc_per_node {args.processes}"
        raise ProblemsError([Problem(key, f"{came} without --plan", rule, fix)])
    if processes.launched() and args.processes != processes.world_size():
        given = f"{came} with {processes.world_size()} that a launcher started"
        raise ProblemsError([Problem(key, given, "a launcher decides it", "leave --processes out")])


@dataclass(frozen=True)
class Facts:
    """What results say of a run besides its job. `original`: the recipe before --tiny, --set and --steps."""

    original: Recipe
    tiny: bool
    emulated_fp16: bool
    clock: start_up.StartClock = field(default_factory=start_up.StartClock)


def job_of(
    args: argparse.Namespace,
    recipe: Recipe,
    original: Recipe,
    name: str,
    *,
    tiny: bool,
    weights: InitialWeights | None,
) -> tuple[Job, Facts]:
    """The job of a recipe and of the flags of `add_run_arguments`.

    `original`: the recipe before --tiny, --set and --steps; `weights`: initial ones. Raises
    ValueError with every problem of recipe and configuration.
    """
    from launch.records.directory import default_path

    take_file_handles(checkup.files_needed(processes.world_size()))
    machine = abilities.detect_machine(args.emulate_fp16)
    plan = plan_job(
        recipe, args.ds_config, machine, compiled=args.compile == "on", initial_weights=weights,
        elsewhere=args.plan and not processes.launched(), planned=args.processes,
    )  # fmt: skip
    # Now, since a run that is still training saves newer ones meanwhile.
    weights = weights and weights.resolved()
    facts = Facts(original, tiny, machine.emulated_fp16)
    if args.out and processes.rank() == 0:
        output.directory("--out", args.out)
    directory = Path(args.out) if args.out else default_path(name, plan.ds_name)
    if (missing := compile_choice.explain_missing(args.compile, plan, machine)) is not None:
        say_on_rank_0(missing)
    compiled = compile_choice.compiles(args.compile, plan, machine)
    return Job(plan, name, directory, args.resume, compiled, initial_weights=weights), facts


def open_run_directory(job: Job, facts: Facts) -> RunDirectory | None:
    """The run directory, which rank 0 makes. Raises ValueError where this rank cannot start there."""
    from launch.checkpoints.run_checkpoints import Checkpoint, Damaged, found
    from launch.ranks import watchdog
    from launch.records.admission import Kept, admit

    processes.check_device()
    check_quickly(job)
    if processes.rank() != 0:
        return None
    every = found(job.checkpoints)
    kept = Kept(
        tuple(each.step for each in every if isinstance(each, Checkpoint)),
        tuple((each.directory, each.why) for each in every if isinstance(each, Damaged)),
    )
    try:
        directory = admit(job.directory, run_facts(job, facts), sys.argv, resume=job.resume, kept=kept)
    except OSError as e:
        refuse_by_system(e, job.directory)
    out_of_memory.forget(directory.path)  # before this rank joins the others: none of them computes yet
    watchdog.forget(directory.path)
    return directory


def run_facts(job: Job, facts: Facts) -> RunFacts:
    """What is known of the run on rank 0 before its data are there."""
    from launch.machine import description
    from launch.records.facts import RunFacts

    machine = description.describe()
    return RunFacts(job.plan, job.name, machine, facts.original, facts.tiny, facts.emulated_fp16)


def check_quickly(job: Job) -> None:
    """The part of doctor.py that takes no time: rank 0 says warnings; what fails raises ProblemsError."""
    found = checks.run(start_checks.quick(job.plan.recipe, job.directory))
    checks.refuse(found)
    for check in found:
        if check.verdict == "warning":
            say_on_rank_0(f"warning: {check.found}; {check.fix}")


def refuse_by_system(error: OSError, place: Path) -> NoReturn:
    """Raise ProblemsError with what the system refuses before a first step; else the error itself."""
    from recipes.refused_by_system import problem, told_by

    if told := told_by(error):
        raise ProblemsError([problem(told, place, "name another directory with --out")]) from None
    raise error


def check_shared(job: Job, meeting: Meeting) -> None:
    """Refuse a run directory that other machines do not see. Collective."""
    from launch.records import shared_directory

    first = processes.rank() == 0
    with shared_directory.token(job.directory) if first else contextlib.nullcontext("") as token:
        name = meeting.from_rank_0(token)
        seen = meeting.settle(lambda: first or shared_directory.shows(job.directory, name))
    meeting.settle(lambda: shared_directory.require(seen, job.directory))


def show_plan(job: Job) -> None:
    from launch.machine import description
    from launch.records.plan_text import Surroundings, describe_plan
    from launch.training.build_model import band_kernel

    if processes.rank() == 0:
        described, kernel = description.describe(), band_kernel(job.plan)
        hardware = description.summary(described)
        if job.plan.layout.world != processes.world_size():
            hardware = assumed_machine(job.plan, hardware)
        around = Surroundings(
            hardware, band_kernel=kernel, run_directory=job.directory, started=processes.world_size()
        )
        print(describe_plan(job.plan, job.name, around, terminal.columns()))


def run(job: Job, directory: RunDirectory | None, facts: Facts, meeting: Meeting, work: Work) -> None:
    """Data, plan on the screen, training, results. `directory` is None except on rank 0."""
    import torch

    from launch.checkpoints import reading
    from launch.records.facts import Ending
    from launch.training import agreement
    from launch.training.early_ends import BrokenData, Diverged, NotSavedError
    from launch.training.loop import train
    from launch.training.run import Start, checksum
    from modeling.parallel.process_grid import ProcessGrid

    start_up.resume_collections()
    facts.clock.reached("imports")
    layout = job.plan.layout
    grid = ProcessGrid(layout.tp, layout.pp, layout.dp, processes.TIMEOUT)
    # One process of a machine prepares a large corpus, and the others wait for hours.
    corpus = meeting.settle(lambda: build_corpus(job, meeting, work), PREPARATION)
    meeting.end()
    try:
        given = job.initial_weights
        agreement.check(job.plan, corpus, grid.control_group, given.directory if given else None)
        # Once, and before anything in the run directory is cut back to it.
        chosen = reading.Choice(None)
        if job.resume:
            chosen = reading.choose(job.checkpoints, grid, checksum(corpus))
        checkpoint = chosen.checkpoint
    except ValueError as e:
        ending.refuse(e)
    except OSError as e:
        refuse_by_system(e, Path.cwd())
    facts.clock.reached("data")
    try:
        opened = open_recorder(job, directory, facts, corpus, chosen)
    except OSError as e:
        refuse_by_system(e, job.directory)
    with opened as recorder:
        try:
            stopped = train(Start(job, recorder, corpus, grid, checkpoint), work.after_training)
        except (Diverged, BrokenData) as e:
            peaks = agreement.peak_memory(grid.control_group)
            if isinstance(e, Diverged):
                recorder.finish(Ending("diverged", peaks=peaks))
            else:
                recorder.finish(Ending("interrupted", e.why, peaks))
            ending.explain(e)
            torch.distributed.barrier(group=grid.control_group)  # rank 0 is not done before it has said why
            raise SystemExit(DIVERGED if isinstance(e, Diverged) else 1) from None
        except NotSavedError as e:
            peaks = agreement.peak_memory(grid.control_group)
            recorder.finish(Ending("not saved", str(e), peaks))
            fix = "make room, or keep fewer (--set run.keep_checkpoints=2), and resume with --resume"
            ending.explain(f"the last checkpoint could not be written: {e}; {fix}")
            torch.distributed.barrier(group=grid.control_group)  # as above
            raise SystemExit(1) from None
        except (RuntimeError, MemoryError) as e:
            said = out_of_memory.said_by(e)
            # Another rank's: it leaves its traceback before it ends, and over its end this one stumbles.
            because = f"rank {processes.rank()}: {said}" if said else out_of_memory.reason(job.directory)
            if because:
                recorder.finish(Ending("OOM", because))
            raise
        peaks = agreement.peak_memory(grid.control_group)
        if stopped:
            recorder.finish(Ending("interrupted", peaks=peaks), str(stopped))
        else:
            more = work.outcome(job, directory, corpus) if directory else {}
            recorder.finish(Ending(peaks=peaks, **more))


def build_corpus(job: Job, meeting: Meeting, work: Work) -> Corpus:
    try:
        return work.corpus(job, meeting)
    except OSError as e:
        refuse_by_system(e, Path.cwd())


def say_on_rank_0(text: str) -> None:
    if processes.rank() == 0:
        terminal.say(text)


def open_recorder(
    job: Job, directory: RunDirectory | None, facts: Facts, corpus: Corpus, chosen: Choice
) -> Silence:
    """What keeps the run's records on rank 0, cut back to the chosen checkpoint; silent elsewhere."""
    from launch.records import vocabulary
    from launch.records.facts import Entropies
    from launch.records.recorder import Recorder
    from launch.records.silence import Silence
    from launch.training.build_model import band_kernel
    from launch.training.run import first_step

    if directory is None:
        return Silence()
    vocabulary.keep(directory.path, corpus.tokenizer)
    entropies = Entropies(corpus.uniform_entropy, corpus.unigram_entropy)
    known = replace(
        run_facts(job, facts), data=corpus.summary, entropies=entropies, band_kernel=band_kernel(job.plan)
    )
    recorder = Recorder(directory, known, first_step(chosen.checkpoint), facts.clock, sys.stdout)
    given = job.initial_weights
    if given and (warning := vocabulary.foreign_tokens(Path(given.directory), corpus.tokenizer)):
        recorder.say(warning)
    for damaged in chosen.passed_over:
        recorder.say(f"WARNING: {damaged}; it is left as it is, and an older checkpoint is taken")
    if chosen.checkpoint:
        recorder.say(f"resumed from {chosen.checkpoint.directory}")
    return recorder
