"""Counts the graphs and breaks of a compiled transformer layer in one training step, by ds_config and device.

compiled_hooks.py OUT.json CASES.json      cases: ds_config, asynchronous
"""

from __future__ import annotations

import functools
from pathlib import Path

from cases import write_found

from ds_configs.plan import Device
from launch.console import terminal
from launch.experiments.groups import temporary_groups
from launch.ranks import processes

terminal.quiet_libraries()

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from ds_configs.resolver import resolve  # noqa: E402
from launch.machine import description  # noqa: E402
from launch.records.facts import RunFacts  # noqa: E402
from launch.training import compiling  # noqa: E402
from launch.training.engine import build_engine, release_at_end, train_step  # noqa: E402
from launch.training.job import Job  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402

LAYERS = 3


def count(case: dict, out: Path) -> dict:
    processes.device = lambda: Device("cpu", case["asynchronous"], own_memory=False)
    settings = [f"model.layers={LAYERS}", "sequence_length=16", "precision=fp32"]
    recipe = catalog.load(catalog.DEFAULT_RECIPE, settings, tiny=True)
    plan = resolve(recipe, case["ds_config"], 1, description.detect_machine())
    draws = torch.Generator().manual_seed(0)
    text = torch.randint(0, recipe.model.vocab_size, (plan.layout.micro, 17), generator=draws)
    weights = torch.full((plan.layout.micro, 16), 1 / text[:, 1:].numel())
    batches = [{"tokens": text[:, :-1], "labels": text[:, 1:], "weights": weights}] * plan.layout.accumulation
    counters.clear()
    with temporary_groups():
        engine = build_engine(
            Job(RunFacts(plan, "hooks"), out.parent, compiled=True), ProcessGrid(1, 1, 1), print
        )
        with release_at_end(engine):
            train_step(engine, batches, ProcessGrid(1, 1, 1), [None] * len(batches))()
            breaks = {reason.splitlines()[0]: times for reason, times in counters["graph_break"].items()}
            return {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks}


if __name__ == "__main__":
    # Graphs are traced and run as they are: what is counted is where they end.
    torch.compile = functools.partial(torch.compile, backend="eager")
    compiling._compiles_whole = lambda plan: False
    write_found(count)
