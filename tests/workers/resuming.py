"""Trains cases uninterrupted, and again with a failure and a resumed run; writes what differs.

resuming.py OUT CASES.json      cases: name, ds_config, tp, pp, dp, precision, settings
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine(emulated_fp16=True)

import torch  # noqa: E402  (after the accelerator is chosen)
from stored import load_weights  # noqa: E402

from data.corpus import build  # noqa: E402
from ds_configs.resolver import resolve  # noqa: E402
from launch.checkpoints import reading, run_checkpoints  # noqa: E402
from launch.records.facts import RunFacts, SilentRecorder  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.loop import train as train_run  # noqa: E402
from launch.training.run import Start, checksum  # noqa: E402
from launch.training.saves import Saves  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402

EARLY = 8, 4, 7  # steps, checkpoint every, failure after
LATE = 60, 44, 46  # by when the products of beta that DeepSpeed's CPU Adam keeps have gathered rounding


class Interrupted(Exception):
    pass


class Records(SilentRecorder):
    def __init__(self, fails_after: int | None = None):
        self.steps, self.fails_after = {}, fails_after

    def step(self, record):
        scale = record.loss_scale
        self.steps[record.step] = [record.loss, record.lr, record.grad_norm, scale, record.skipped]
        if record.step == self.fails_after:
            raise Interrupted


class WaitForTheDisk:
    """A slow one does not decide which checkpoint is the newest when the run fails."""

    def __init__(self, run):
        self.run = run

    def after_step(self, record):
        pending = next(each.saver._pending for each in self.run.callbacks if isinstance(each, Saves))
        if pending:
            pending.written.exception()

    def end(self, error): ...


def train(plan, directory: Path, resume: bool, fails_after: int | None = None) -> dict:
    records = Records(fails_after)
    job = Job(RunFacts(plan, directory.name), directory, callbacks=(WaitForTheDisk,))
    corpus = build(plan.recipe, say=records.say)
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    saved = (
        reading.choose(job.checkpoints, grid, plan.recipe, checksum(corpus)).checkpoint if resume else None
    )
    try:
        train_run(Start(job, records, corpus, grid, saved))
    except Interrupted:
        torch.distributed.barrier()
    return records.steps


def run(case: dict, out: Path) -> None:
    steps, save_every, fails_after = LATE if case["name"].endswith("late") else EARLY
    settings = [
        *(f"parallel.{degree}={case[degree]}" for degree in ("tp", "pp", "dp")), "dropout.hidden=0.1",
        "dropout.attention=0.1", "optimizer.betas=[0.9, 0.999]", f"run.save_every={save_every}",
        f"precision={case['precision']}", *case["settings"],
    ]  # fmt: skip
    recipe = catalog.load(
        "bert/sotu" if case["name"].startswith("bert") else catalog.DEFAULT_RECIPE,
        settings,
        tiny=True,
        steps=steps,
    )
    plan = resolve(recipe, case["ds_config"], processes.world_size(), MACHINE)
    whole, broken = out / f"{case['name']}-whole", out / f"{case['name']}-broken"
    uninterrupted = train(plan, whole, resume=False)
    train(plan, broken, resume=False, fails_after=fails_after)
    resumed = train(plan, broken, resume=True)
    torch.distributed.barrier()
    if processes.rank() == 0:
        a, b = (load_weights(run_checkpoints.newest(d / "checkpoints").directory) for d in (whole, broken))
        (out / f"{case['name']}.json").write_text(json.dumps({
            "resumed_steps": sorted(resumed),
            "different_steps": [s for s in resumed if resumed[s] != uninterrupted[s]],
            "different_weights": [n for n in a if not torch.equal(a[n], b[n])],
            "tensors": len(a),
        }))  # fmt: skip


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for one in json.loads(Path(sys.argv[2]).read_text()):
            run(one, Path(sys.argv[1]))
