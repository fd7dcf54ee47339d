"""Scores one model under several layouts, in one launch.

scoring_layouts.py JOBS.json     run, texts (.jsonl), long (.txt), out, and cases

A case has a name, a ds_config, settings, a batch and a precision.

Leaves the figures and the score of every window of each case in `out`, by the case's name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.console import quiet
from launch.machine import abilities
from launch.ranks import ending, processes

quiet.quiet_libraries()
MACHINE = abilities.detect_machine()

# After the accelerator is chosen.
from launch.evaluation.scoring import build_scoring_engine, figures, score, steps_of  # noqa: E402
from launch.evaluation.scoring_job import Wishes, checked_job, read_task  # noqa: E402
from launch.experiments.parity.groups import temporary_groups  # noqa: E402
from launch.ranks.watchdog import Watchdog  # noqa: E402
from launch.training.engine import release_at_end  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402


def score_case(run: str, texts: str, long: str, case: dict) -> dict:
    asked = dict(
        lambada=dict(task="lambada", variant="openai", data=texts),
        perplexity=dict(task="perplexity", data=texts, stride=24),
        overlapping=dict(task="perplexity", data=long, stride=24),
    )
    how = {"batch": 2, **{name: value for name, value in case.items() if name != "name"}}
    world, found = processes.world_size(), {}
    jobs = {name: checked_job(Wishes(run, **task, **how), world, MACHINE) for name, task in asked.items()}
    plan = jobs["lambada"].plan
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    engine = build_scoring_engine(plan, grid, str(jobs["lambada"].model.weights), print)
    with release_at_end(engine):
        for name, job in jobs.items():
            data = read_task(job, print)
            scores = score(engine, plan, grid, data.windows, Watchdog(None, 0))
            found[name] = dict(
                figures=figures(data, scores), nll=[s.nll for s in scores], right=[s.right for s in scores],
                cut=[step.scored < step.length for step in steps_of(data.windows, 1, plan)],
            )  # fmt: skip
    return found


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        jobs = json.loads(Path(sys.argv[1]).read_text())
        for case in jobs["cases"]:
            with temporary_groups():
                found = score_case(jobs["run"], jobs["texts"], jobs["long"], case)
            if processes.rank() == 0:
                (Path(jobs["out"]) / f"{case['name']}.json").write_text(json.dumps(found))
