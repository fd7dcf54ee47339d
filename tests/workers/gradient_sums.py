"""Gradient norms of steps whose micro-batches are all the same, in bf16: one micro-batch, and many.

    gradient_sums.py OUT.json CASES.json      cases: ds_config, pp, accumulation, sums (grad_accum_dtype)

However many there are, their mean is the gradient of one: what differs was lost by adding up.
"""

from __future__ import annotations

import json
from pathlib import Path

from cases import write_found

from launch.console import terminal
from launch.machine import description
from launch.ranks import processes

terminal.quiet_libraries()
MACHINE = description.detect_machine()

import torch  # noqa: E402  (after the accelerator is chosen)

from ds_configs.resolver import resolve  # noqa: E402
from launch.experiments.groups import temporary_groups  # noqa: E402
from launch.records.facts import RunFacts  # noqa: E402
from launch.training.engine import build_engine, release_at_end, train_step  # noqa: E402
from launch.training.job import Job  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402


def norm(case: dict, out: Path) -> float | None:
    world, pp, accumulation = processes.world_size(), case["pp"], case["accumulation"]
    settings = [
        "model.layers=2", "model.hidden=32", "model.heads=2", "sequence_length=16", "precision=bf16",
        "dropout={hidden: 0, attention: 0}", "optimizer.clip=0", f"parallel.dp={world // pp}",
        f"batch.global={accumulation * world // pp}", "batch.micro=1", f"batch.accumulation={accumulation}",
    ]  # fmt: skip
    recipe = catalog.load(catalog.DEFAULT_RECIPE, settings, tiny=True)
    config = json.loads((Path("ds_configs") / f"{case['ds_config']}.json").read_text())
    config["data_types"] = {"grad_accum_dtype": case["sums"]}
    path = out.with_name(f"{case['ds_config']}-{processes.rank()}.json")
    path.write_text(json.dumps(config))
    plan = resolve(recipe, path, world, MACHINE)
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    draws = torch.Generator().manual_seed(0)
    text = torch.randint(0, recipe.model.vocab_size, (1, recipe.sequence_length + 1), generator=draws)
    weights = torch.full((1, recipe.sequence_length), 1 / recipe.sequence_length)
    batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "weights": weights}
    with temporary_groups():
        engine = build_engine(Job(RunFacts(plan, "sums"), out.parent), grid, print)
        with release_at_end(engine):
            read_outcome = train_step(engine, [batch] * accumulation, grid, [None] * accumulation)
            return read_outcome().grad_norm


if __name__ == "__main__":
    write_found(norm)
