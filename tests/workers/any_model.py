"""Trains models of transformers by their configs, and each again in a plain loop of torch; writes both.

any_model.py OUT CASES.json      cases: name, ds_config, settings, plain (the batches in a plain loop, too),
                                 fails_after (steps, then resumed)
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import deepspeed
import numpy as np
import torch
from resuming import MACHINE, Interrupted, Records, WaitForTheDisk  # first: it chooses the accelerator
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from data.corpus import build
from data.loader import StepBatches
from ds_configs.resolver import resolve
from launch.checkpoints import reading
from launch.ranks import ending, processes
from launch.records.facts import RunFacts
from launch.training import loop, transformers_trainer
from launch.training.job import Job
from launch.training.run import Start, checksum
from launch.training.schedule import learning_rate
from modeling.parallel.process_grid import ProcessGrid
from recipes import catalog


class Recorded(Records):
    def __init__(self, fails_after):
        super().__init__(fails_after)
        self.validations = []

    def validation(self, step, outcome, kind="validation"):
        self.validations.append(outcome.loss)


def plain(recipe, layout) -> list[float]:
    """The losses of a loop as one would write it, over the micro-batches of all ranks."""
    corpora = [build(recipe, say=lambda text: None) for _ in range(layout.dp)]
    how = {"seed": recipe.seed, "layout": layout, "sizes": recipe.sizes_in_data}
    ranks = [StepBatches(samples=c.train, dp_rank=rank, **how) for rank, c in enumerate(corpora)]
    stated = {**recipe.model.config}
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        stated[key] = getattr(corpora[0].tokenizer, key)
    masked = recipe.model.family == "masked_lm"
    torch.manual_seed(recipe.seed)
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(**stated)).train()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
    groups.append({"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0})
    chosen = recipe.optimizer
    decay = chosen.weight_decay
    optimizer = torch.optim.AdamW(groups, chosen.lr, chosen.betas, chosen.eps, weight_decay=decay)
    losses = []
    for step in range(recipe.steps):
        batches = [*chain.from_iterable(map(next, ranks))]
        counts = [int((batch["weights"] > 0).sum()) for batch in batches]
        total = 0.0
        for batch, count in zip(batches, counts, strict=True):
            mean = masked_loss(model, batch) if masked else causal_loss(model, batch)
            share = mean * (count / sum(counts))
            share.backward()
            total += float(share)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), chosen.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    for rank in ranks:
        rank.close()
    return losses


def causal_loss(model, batch):
    logits = model(input_ids=batch["tokens"]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def masked_loss(model, batch):
    tokens = batch["tokens"]
    seen = (torch.arange(tokens.shape[1]) < batch["lengths"][:, None]).long()
    labels = torch.full_like(tokens, -100)
    real = batch["weights"] > 0
    rows = torch.arange(len(tokens))[:, None].expand_as(real)
    labels[rows[real], batch["positions"][real]] = batch["labels"][real]
    return model(input_ids=tokens, attention_mask=seen, labels=labels).loss


def train(case: dict, out: Path) -> None:
    recipe = catalog.load("default/sotu", case["settings"], steps=case.get("steps", 4), trained=False)
    plan = resolve(recipe, case["ds_config"], processes.world_size(), MACHINE)
    corpus = build(recipe, say=lambda text: None)
    grid = ProcessGrid(1, 1, plan.layout.dp)
    directory, records = out / case["name"], Recorded(case.get("fails_after"))
    job = Job(RunFacts(plan, case["name"]), directory, callbacks=(WaitForTheDisk,))
    kinds = set()

    def noted(engine, batch, right=transformers_trainer.forward):
        kinds.update(str(each.dtype) for each in engine.module.buffers() if each.is_floating_point())
        return right(engine, batch)

    def rounding(*given, right=deepspeed.initialize, **how):
        """As DeepSpeed 0.18.9 does, which casts the whole module."""
        made = right(*given, **how)
        for buffer in made[0].module.buffers():
            buffer.data = buffer.data.to(torch.bfloat16) if buffer.is_floating_point() else buffer.data
        return made

    if recipe.precision == "bf16":
        deepspeed.initialize = rounding
    transformers_trainer.forward = noted
    try:
        loop.train(Start(job, records, corpus, grid))
    except Interrupted:
        torch.distributed.barrier()
        records.fails_after = None
        chosen = reading.choose(job.checkpoints, grid, recipe, checksum(corpus))
        assert chosen.checkpoint.step == 2
        loop.train(Start(job, records, build(recipe, say=lambda text: None), grid, chosen.checkpoint))
    torch.distributed.barrier()
    if processes.rank() == 0:
        own = [values[0] for _, values in sorted(records.steps.items())]
        report = {
            "losses": own,
            "validations": records.validations,
            "steps": records.steps,
            "buffers": [*kinds],
        }
        if case.get("plain"):
            report["plain"] = plain(recipe, plan.layout)
            report["apart"] = float(np.abs(np.subtract(own, report["plain"])).max())
        (directory / "reported.json").write_text(json.dumps(report))


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for one in json.loads(Path(sys.argv[2]).read_text()):
            train(one, Path(sys.argv[1]))
