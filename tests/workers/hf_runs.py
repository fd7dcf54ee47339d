"""Trains cases with our GPT-2 or with that of `transformers` through its Trainer, right and broken.

Writes what they report.

    hf_runs.py OUT CASES.json      cases: name, ds_config, settings; broken (a key of BREAKAGES),
                                   fails_after (steps, then resumed)

A rank that draws weights which nobody uses fails.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from resuming import MACHINE, Interrupted, Records  # first: it chooses the accelerator
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from data.corpus import build
from ds_configs.resolver import resolve
from launch.checkpoints import reading
from launch.ranks import ending, processes
from launch.records.facts import RunFacts
from launch.training import loop, transformers_model, transformers_trainer
from launch.training.job import Job
from launch.training.run import Start, checksum
from modeling.initialization import Init
from modeling.parallel.process_grid import ProcessGrid
from recipes import catalog

STEPS = 4


class Recorded(Records):
    def __init__(self, fails_after):
        super().__init__(fails_after)
        self.validations, self.said = [], []

    def say(self, text):
        self.said.append(text)

    def validation(self, step, outcome, kind="validation"):
        self.validations.append(outcome.loss)


def unshifted(engine, batch, right=transformers_trainer.forward):
    return right(engine, {**batch, "labels": batch["tokens"]})


def other_weights(model, recipe, init, right=transformers_model._fill):
    right(model, recipe, replace(init, seed=init.seed + 1))


def swapped(batches, right=transformers_trainer.each_micro_batch):
    micro_batches = right(batches)
    for first, second in zip(micro_batches, micro_batches, strict=False):
        yield second
        yield first


def all_decayed(module, decay):
    return [{"params": list(module.parameters()), "weight_decay": decay}]


BREAKAGES = {
    "labels are not shifted": (transformers_trainer, "forward", unshifted),
    "other weights are drawn": (transformers_model, "_fill", other_weights),
    "micro-batches in another order": (transformers_trainer, "each_micro_batch", swapped),
    "everything is decayed": (transformers_trainer, "parameter_groups", all_decayed),
    "dropout is not seeded by step": (transformers_trainer, "seed_step", lambda seed, step, at: None),
}


class BlocksRun:
    """Counts forward passes of transformers' layers in training, those that recompute among them.

    By their attention: a layer whose own `forward` is replaced does not recompute.
    """

    def __init__(self):
        self.times = 0

    def __call__(self, attention, *inputs, right=GPT2Attention.forward, **how):
        self.times += torch.is_grad_enabled()
        return right(attention, *inputs, **how)


def drawn_once(recipe, *how, right=transformers_model.build, drawn=True, **more):
    """`transformers_model.build`; transformers draws nothing, and no two ranks the same parameter."""
    names = []

    def noted(init, name, shape, std, draw=Init._normal):
        names.append(name)
        return draw(init, name, shape, std)

    unwanted = AssertionError("transformers draws weights")
    with (
        mock.patch.object(torch.Tensor, "normal_", side_effect=unwanted),
        mock.patch.object(Init, "_normal", noted),
    ):
        model = right(recipe, *how, drawn=drawn, **more)
    of_ranks = [None] * processes.world_size()
    torch.distributed.all_gather_object(of_ranks, names)
    every = [name for of_rank in of_ranks for name in of_rank]
    wanted = 2 + 4 * recipe.model.layers if drawn else 0  # a resumed run draws none
    assert len(every) == len(set(every)) == wanted, of_ranks
    return model


def train(case: dict, out: Path) -> None:
    recipe = catalog.load(
        catalog.DEFAULT_RECIPE, ["optimizer.clip=0.5", *case["settings"]], tiny=True, steps=STEPS
    )
    plan = resolve(recipe, case["ds_config"], processes.world_size(), MACHINE)
    corpus, grid = build(recipe, say=lambda text: None), ProcessGrid(1, 1, plan.layout.dp)
    directory, fails_after = out / case["name"], case.get("fails_after")
    job = Job(RunFacts(plan, case["name"]), directory)
    records, blocks = Recorded(fails_after), BlocksRun()
    patches = [
        (transformers_model, "build", drawn_once),
        (GPT2Attention, "forward", lambda *a, **k: blocks(*a, **k)),
    ]
    with contextlib.ExitStack() as stack:
        for patch in (*patches, *([BREAKAGES[case["broken"]]] if case.get("broken") else [])):
            stack.enter_context(mock.patch.object(*patch))
        try:
            loop.train(Start(job, records, corpus, grid))
        except Interrupted:
            torch.distributed.barrier()
            records.fails_after = None
            chosen = reading.choose(job.checkpoints, grid, job.plan.recipe, checksum(corpus))
            loop.train(Start(job, records, corpus, grid, chosen.checkpoint))
    torch.distributed.barrier()
    if processes.rank() == 0:
        per_layer = blocks.times / (recipe.model.layers * plan.layout.accumulation * len(records.steps))
        (directory / "reported.json").write_text(json.dumps({
            "steps": records.steps, "validations": records.validations, "said": records.said,
            "blocks_run": per_layer,
        }))  # fmt: skip


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for one in json.loads(Path(sys.argv[2]).read_text()):
            train(one, Path(sys.argv[1]))
