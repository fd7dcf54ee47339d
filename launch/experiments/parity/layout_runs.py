"""Train a recipe under several layouts, with one launch per number of processes.

python -m torch.distributed.run --nproc_per_node=2 launch/experiments/parity/layout_runs.py CASES.json

(started by `run_cases`, which writes CASES.json)
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ds_configs.plan import Machine
from launch.console import terminal
from launch.experiments.launching import run_and_wait, torchrun
from launch.experiments.parity.comparison import RunOutcome, read_outcome
from launch.experiments.parity.groups import temporary_groups
from launch.experiments.parity.layout_cases import LayoutCase, case_plan
from launch.machine import description
from launch.ranks import ending, joining
from launch.ranks.processes import TIMEOUT, rank
from recipes import catalog
from recipes.problems import counted
from recipes.schema import Recipe

Start = Callable[[int, Path, Path], None]  # (processes, CASES.json, log to write)


def start_torchrun(processes: int, jobs: Path, log: Path) -> None:
    """Run the cases of a file on `processes` ranks with torchrun."""
    run_and_wait([*torchrun(processes), __file__, str(jobs)], log)


def run_cases(
    recipe: Recipe,
    cases: Sequence[LayoutCase],
    out: Path,
    keep: bool = True,
    start: Start = start_torchrun,
) -> Iterator[RunOutcome]:
    """Run every case, fewest processes first; remove each run directory unless `keep`.

    Cases with the same number of processes share a launch, since a launch takes longer than a case. After a
    failure another launch runs the rest.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(catalog.dump(recipe))
    launches = itertools.count(1)
    for processes in sorted({case.processes for case in cases}):
        waiting = [case for case in cases if case.processes == processes]
        while waiting:
            number = next(launches)
            jobs = out / f"jobs-{number}.json"
            log = out / f"log-{number}.txt"
            jobs.write_text(json.dumps([vars(case) for case in waiting]))
            names = "; ".join(case.name for case in waiting)
            terminal.say(f"{counted(processes, 'process')}: {names}")
            # from a launch that failed before its first case
            for earlier in out.glob("error-rank-*.txt"):
                earlier.unlink()
            start(processes, jobs, log)
            began = [case for case in waiting if (out / case.folder).exists()]
            for case in began or waiting:
                run = out / case.folder
                yield read_outcome(case, run, log)
                if not keep:
                    shutil.rmtree(run, ignore_errors=True)
            waiting = waiting[len(began) :] if began else []


def work(jobs: Path) -> None:
    """Run every case of one launch in turn on this rank, in the same process group."""
    out = jobs.parent
    current = out  # run directory of the current case
    meeting = joining.meet(out=str(out))
    machine = description.detect_machine()
    cases = [LayoutCase(**case) for case in json.loads(jobs.read_text())]
    with joining.joined(
        meeting,
        max(case.tp for case in cases),
        note_failure=lambda text: ending.keep_error(current, text),
    ):
        recipe = catalog.load_resolved(out / "recipe.yaml")
        for case in cases:
            current = out / case.folder
            with temporary_groups():
                run_case(recipe, case, current, machine)


def run_case(
    recipe: Recipe, case: LayoutCase, directory: Path, machine: Machine
) -> None:
    """Train one case. A failure ends the launch with a traceback; a divergence is only recorded."""
    from data.corpus import build
    from launch.experiments.parity.gradients import FirstGradients
    from launch.records import vocabulary
    from launch.records.admission import admit
    from launch.records.facts import Ending, Entropies, RunFacts, SilentRecorder
    from launch.records.recorder import Recorder
    from launch.training.early_ends import Diverged
    from launch.training.job import Job
    from launch.training.loop import train
    from launch.training.run import Start
    from modeling.parallel.process_grid import ProcessGrid

    directory.mkdir(exist_ok=True)
    plan = case_plan(recipe, case, machine)
    facts = RunFacts(plan, case.name, original=recipe)
    compiled = case.compiled_from is not None
    job = Job(facts, directory, compiled=compiled, callbacks=(FirstGradients,))
    corpus = build(recipe, say=lambda text: None)
    recorder = SilentRecorder()
    if rank() == 0:
        entropies = Entropies(corpus.uniform_entropy, corpus.unigram_entropy)
        machine_facts = description.describe()
        facts = replace(
            facts, machine=machine_facts, data=corpus.summary, entropies=entropies
        )
        opened = admit(directory, facts, sys.argv)
        vocabulary.keep(opened.path, corpus.tokenizer)
        recorder = Recorder(opened, facts)
    with recorder:
        try:
            grid = ProcessGrid(case.tp, case.pp, case.dp, TIMEOUT)
            train(Start(job, recorder, corpus, grid))
        except Diverged as error:  # on all ranks alike, so the next case can run
            ending.keep_error(directory, error.why)
        else:
            recorder.finish(Ending())


if __name__ == "__main__":
    work(Path(sys.argv[1]))
