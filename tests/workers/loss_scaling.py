"""Trains the tiny recipe in emulated fp16 under given loss-scaler settings and writes each step's record.

loss_scaling.py OUT CASES.json      cases: name, ds_config, tp, pp, dp, fp16 (section of the JSON), steps
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

from data.corpus import build  # noqa: E402
from ds_configs.resolver import resolve  # noqa: E402
from launch.records.facts import RunFacts, SilentRecorder  # noqa: E402
from launch.training.early_ends import Diverged  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.loop import train as train_run  # noqa: E402
from launch.training.run import Start  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402


class Records(SilentRecorder):
    def __init__(self):
        self.steps = []

    def step(self, record):
        self.steps.append({
            "loss": record.loss, "lr": record.lr, "norm": record.grad_norm, "scale": record.loss_scale,
            "skipped": record.skipped,
        })  # fmt: skip


def run(case: dict, out: Path) -> None:
    settings = [
        f"parallel.tp={case['tp']}",
        f"parallel.pp={case['pp']}",
        f"parallel.dp={case['dp']}",
        "batch.accumulation=2",
    ]
    recipe = catalog.load(overrides=settings, tiny=True, steps=case["steps"])
    config = json.loads((Path("ds_configs") / f"{case['ds_config']}.json").read_text())
    config["fp16"], config["bf16"] = {"enabled": True, **case["fp16"]}, {"enabled": False}
    path = out / f"{case['name']}.json"
    if processes.rank() == 0:
        path.write_text(json.dumps(config))
    torch.distributed.barrier()
    plan = resolve(recipe, path, processes.world_size(), MACHINE)
    records, problem = Records(), None
    try:
        corpus = build(recipe, say=records.say)
        job = Job(RunFacts(plan, case["name"]), out / case["name"])
        train_run(Start(job, records, corpus, ProcessGrid(case["tp"], case["pp"], case["dp"])))
    except Diverged as e:
        problem = str(e)
    if processes.rank() == 0:
        (out / f"{case['name']}.result.json").write_text(
            json.dumps({"steps": records.steps, "problem": problem})
        )


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for one in json.loads(Path(sys.argv[2]).read_text()):
            run(one, Path(sys.argv[1]))
