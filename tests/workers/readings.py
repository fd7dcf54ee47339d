"""Trains runs that save each step, or reads their checkpoints into engines of other layouts and proves them.

readings.py JOBS.json     a list; of each job: out, case (as in any_layout.py), steps, sources (checkpoints, the
                          first of which is resumed; []: the job trains)

Leaves found.json in `out`: checkpoint -> the refusal, or null; {}: this layout is refused before.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import any_layout

from data.corpus import build
from launch.checkpoints import reading, run_checkpoints
from launch.experiments.groups import temporary_groups
from launch.ranks import ending, processes
from launch.records.facts import RunFacts
from launch.training.job import Job
from launch.training.run import Start
from launch.training.validations import Validations
from modeling.parallel.process_grid import ProcessGrid
from recipes.files import FileError
from recipes.problems import ProblemsError

checkpoint_in = functools.cache(run_checkpoints.read)


def refusal_of(run, checkpoint):
    if len(checkpoint.manifest.kinds) == 1:
        run.state.adam.state.clear()  # of the reading before: a new engine has none
    try:
        reading.load(run.state, checkpoint)
        any_layout.go_to(run, checkpoint)
        Validations(run).prove(checkpoint, weights=False)
    except FileError as error:
        return str(error)
    return None


def work(job):
    out, sources = Path(job["out"]), job["sources"]
    found = {}
    try:
        plan = any_layout.plan_of(job["case"], job["steps"])
    except ProblemsError:
        return found
    first = checkpoint_in(Path(sources[0])) if sources else None
    records = any_layout.Records()
    corpus = build(plan.recipe, say=records.say)
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)

    def read_all(run):
        found.update({source: refusal_of(run, checkpoint_in(Path(source))) for source in sources})

    any_layout.train_then(Start(Job(RunFacts(plan, out.name), out), records, corpus, grid, first), read_all)
    return found


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for each in json.loads(Path(sys.argv[1]).read_text()):
            with temporary_groups():
                found = work(each)
            if processes.rank() == 0:
                Path(each["out"]).mkdir(parents=True, exist_ok=True)
                (Path(each["out"]) / "found.json").write_text(json.dumps(found))
