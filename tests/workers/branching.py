"""Trains runs under one layout each, and branches of them; writes their losses.

branching.py OUT CASES.json     cases: name, ds_config, settings, branches: (name, ds_config, settings) each

Every run saves after steps 3 and 6, every branch goes on from its step 3. Leaves OUT/NAME/losses.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine()

import torch  # noqa: E402  (after the accelerator is chosen)

from data.corpus import build  # noqa: E402
from ds_configs.plan import Plan  # noqa: E402
from ds_configs.resolver import resolve  # noqa: E402
from launch.checkpoints import branching  # noqa: E402
from launch.experiments.groups import temporary_groups  # noqa: E402
from launch.records.directory import RunDirectory  # noqa: E402
from launch.records.facts import RunFacts, SilentRecorder  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.loop import train as train_run  # noqa: E402
from launch.training.run import Start, checksum  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402


class Records(SilentRecorder):
    """Losses by step, and the data of each."""

    def __init__(self):
        self.steps, self.batches, self.validations = {}, {}, {}

    def step(self, record):
        self.steps[record.step] = record.loss

    def validation(self, step, outcome, kind="validation"):
        self.validations[step] = outcome.loss

    def kept(self, run):
        def keep(record):
            self.batches[record.step] = run.batches.digest(record.step - 1)

        return SimpleNamespace(after_step=keep, end=lambda error: None)


def train(out: Path, plan: Plan) -> None:
    records = Records()
    corpus = build(plan.recipe, say=lambda line: None)
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    if processes.rank() == 0:
        out.mkdir()
        RunDirectory(out).write_description(plan, [])
        corpus.tokenizer.save_pretrained(out / "tokenizer")
    torch.distributed.barrier()
    chosen = None
    if plan.recipe.branch:
        chosen = branching.choose(plan.recipe, grid, checksum(corpus)).checkpoint
    job = Job(RunFacts(plan, out.name), out, callbacks=(records.kept,))
    train_run(Start(job, records, corpus, grid, chosen))
    if processes.rank() == 0:
        (out / "losses.json").write_text(json.dumps(vars(records)))


def run(out: Path, case: dict) -> None:
    world = processes.world_size()
    parent = out / case["name"]
    settings = ["dropout.hidden=0.1", "run.save_every=3", "precision=fp32", *case["settings"]]
    recipe = catalog.load(case.get("recipe", "default/sotu"), settings, tiny=True, steps=6)
    with temporary_groups():
        train(parent, resolve(recipe, case["ds_config"], world, MACHINE))
    for name, config, changes in case["branches"]:
        recipe = branching.BranchPoint.of(f"{parent}@3").recipe(changes, {}, None)
        with temporary_groups():
            train(out / name, resolve(recipe, config, world, MACHINE))


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for one in json.loads(Path(sys.argv[2]).read_text()):
            run(Path(sys.argv[1]), one)
