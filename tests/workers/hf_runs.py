"""Trains cases with our GPT-2 or with that of `transformers` through its Trainer, right and broken, and writes what they report.

    hf_runs.py OUT CASES.json      cases: name, ds_config, settings; broken (a key of BREAKAGES), fails_after (steps, then resumed)
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import torch
from resuming import MACHINE, Interrupted, Records  # first: it chooses the accelerator

from data.corpus import build
from ds_configs.resolver import resolve
from launch import hf_model, hf_training, pretrain, startup
from modeling.process_grid import ProcessGrid
from recipes import catalog

STEPS = 4


class Recorded(Records):
    def __init__(self, fails_after):
        super().__init__(fails_after)
        self.validations = []

    def validation(self, step, report, kind="validation"):
        self.validations.append(report.loss)


def unshifted(engine, batch, right=hf_training.forward):
    return right(engine, {**batch, "labels": batch["tokens"]})


def swapped(run, right=hf_training._flat):
    micro_batches = right(run)
    for first, second in zip(micro_batches, micro_batches, strict=False):
        yield second
        yield first


def all_decayed(module, decay):
    return [{"params": list(module.parameters()), "weight_decay": decay}]


BREAKAGES = {
    "labels are not shifted": (hf_training, "forward", unshifted),
    "transformers draws the weights": (hf_model, "_copy", lambda full, parameter: None),
    "micro-batches in another order": (hf_training, "_flat", swapped),
    "everything is decayed": (hf_training, "parameter_groups", all_decayed),
    "dropout is not seeded by step": (hf_training, "seed_step", lambda seed, step, at: None),
}


def train(case: dict, out: Path) -> None:
    recipe = catalog.load(catalog.DEFAULT_RECIPE, ["optimizer.clip=0.5", *case["settings"]], tiny=True, steps=STEPS)
    plan = resolve(recipe, case["ds_config"], startup.world_size(), MACHINE)
    corpus, grid = build(recipe, say=lambda text: None), ProcessGrid(1, 1, plan.layout.dp)
    directory, fails_after = out / case["name"], case.get("fails_after")
    records = Recorded(fails_after)
    with mock.patch.object(*BREAKAGES[case["broken"]]) if case.get("broken") else contextlib.nullcontext():
        try:
            pretrain.train(pretrain.Job(plan, case["name"], directory), records, corpus, grid)
        except Interrupted:
            torch.distributed.barrier()
            records.fails_after = None
            pretrain.train(pretrain.Job(plan, case["name"], directory, resume=True), records, corpus, grid)
    torch.distributed.barrier()
    if startup.rank() == 0:
        (directory / "reported.json").write_text(json.dumps({"steps": records.steps, "validations": records.validations}))


if __name__ == "__main__":
    with startup.clean_exit():
        startup.start_processes()
        for one in json.loads(Path(sys.argv[2]).read_text()):
            train(one, Path(sys.argv[1]))
