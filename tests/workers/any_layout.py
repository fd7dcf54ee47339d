"""Trains runs one after the other, each from its beginning or from a checkpoint of another one.

any_layout.py JOBS.json     a list; of each job: out (a directory), steps, source (null, or a directory like
                            step-000004), case (ds_config, tp, pp, dp, precision, recipe, settings; or
                            ds_config, tp, pp, dp, and resolved, the recipe.yaml of a run)

Leaves losses.json next to the checkpoint of the last step in `out`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine(emulated_fp16=True)

from data.corpus import build  # noqa: E402  (after the accelerator is chosen)
from ds_configs.resolver import resolve  # noqa: E402
from launch.checkpoints import run_checkpoints  # noqa: E402
from launch.experiments.groups import temporary_groups  # noqa: E402
from launch.records.facts import RunFacts, SilentRecorder  # noqa: E402
from launch.training import loop  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.micro_batches import training_batches  # noqa: E402
from launch.training.run import Start  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402


class Records(SilentRecorder):
    """Losses by step."""

    def __init__(self):
        self.losses, self.said = {}, []

    def step(self, record):
        self.losses[record.step] = record.loss

    def say(self, text):
        self.said.append(text)


def plan_of(case: dict, steps: int):
    if "resolved" in case:
        recipe = catalog.load_resolved(case["resolved"])
        degrees = {degree: case.get(degree, 1) for degree in ("tp", "pp", "dp")}
        parallel = recipe.parallel.model_copy(update=degrees)
        recipe = recipe.model_copy(update={"parallel": parallel})
        return resolve(recipe, case["ds_config"], processes.world_size(), MACHINE)
    settings = [
        *(f"parallel.{degree}={case.get(degree, 1)}" for degree in ("tp", "pp", "dp")),
        f"precision={case.get('precision', 'fp32')}", *case.get("settings", ()),
    ]  # fmt: skip
    asked = {"tiny": True, "steps": steps, "trained": False}  # whatever of a schedule the steps reach
    recipe = catalog.load(case.get("recipe", catalog.DEFAULT_RECIPE), settings, **asked)
    return resolve(recipe, case["ds_config"], processes.world_size(), MACHINE)


def go_to(run, checkpoint) -> None:
    """Have a run read its data from where a checkpoint was saved. Collective."""
    run.batches.close()
    run.batches = training_batches(run.job.plan, run.corpus, run.grid, checkpoint)
    run.done = checkpoint.step


def train_then(start, after) -> None:
    """Train, and give the run after its last step to `after`. Collective."""

    class AtEnd:
        def __init__(self, run):
            self.run = run

        def after_step(self, record): ...

        def end(self, error):
            if error is None:
                after(self.run)

    loop.train(replace(start, job=replace(start.job, callbacks=(AtEnd,))))


def train(out: Path, case: dict, steps: int, source: str | None) -> None:
    plan, records = plan_of(case, steps), Records()
    corpus = build(plan.recipe, say=records.say)
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    saved = run_checkpoints.read(Path(source)) if source else None
    loop.train(Start(Job(RunFacts(plan, out.name), out), records, corpus, grid, saved))
    if processes.rank() == 0:
        (out / "losses.json").write_text(json.dumps(records.losses))


def main(jobs: Path) -> None:
    processes.start_processes()
    for job in json.loads(jobs.read_text()):
        with temporary_groups():
            train(Path(job["out"]), job["case"], job["steps"], job["source"])


if __name__ == "__main__":
    with ending.clean_exit():
        main(Path(sys.argv[1]))
