"""Trains cases whose second step has one infinite element in the gradient of one tensor on the last rank.

    one_infinity.py OUT.json CASES.json      cases: ds_config, tp, pp, dp, precision, accumulation

Writes for each case whether each rank skipped each step, and whether a skipped step left the weights alone.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine(emulated_fp16=True)

import torch  # noqa: E402  (after the accelerator is chosen)

from ds_configs.resolver import resolve  # noqa: E402
from launch.checkpoints.engine_state import EngineState  # noqa: E402
from launch.experiments.groups import temporary_groups  # noqa: E402
from launch.records.facts import RunFacts  # noqa: E402
from launch.training.engine import build_engine, release_at_end, train_step  # noqa: E402
from launch.training.job import Job  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402


class Spoiler:
    """Make one element of a gradient infinite in the step that it is told."""

    spoils = False

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.spoils:
            gradient = gradient.clone()
            gradient.view(-1)[-1] = math.inf
        return gradient


def masters(engine, grid) -> list[torch.Tensor]:
    state = EngineState(engine, grid)
    found = [state.read(p, f, "weight").clone() for p in state.partitions for f in p.fragments if f.elements]
    state.close()
    return found


def run(case: dict) -> dict:
    world, count = processes.world_size(), case["accumulation"]
    settings = [
        *(f"parallel.{degree}={case[degree]}" for degree in ("tp", "pp", "dp")), "model.layers=2",
        "model.hidden=32", "model.heads=2", "sequence_length=16", "schedule.warmup_steps=0",
        f"precision={case['precision']}", f"batch.global={2 * case['dp'] * case['accumulation']}",
        "batch.micro=2", f"batch.accumulation={case['accumulation']}",
    ]  # fmt: skip
    recipe = catalog.load(catalog.DEFAULT_RECIPE, settings, tiny=True)
    plan = resolve(recipe, case["ds_config"], world, MACHINE)
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    draws = torch.Generator().manual_seed(grid.at.dp)
    text = torch.randint(0, recipe.model.vocab_size, (2, recipe.sequence_length + 1), generator=draws)
    batch = {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "weights": torch.full((2, recipe.sequence_length), 1 / (2 * recipe.sequence_length)),
    }
    skipped, kept, norms = [], [], []
    with temporary_groups():
        engine = build_engine(Job(RunFacts(plan, "spoiled"), Path("unused")), grid, print)
        with release_at_end(engine):
            spoiler = Spoiler()
            if processes.rank() == world - 1:
                list(engine.module.parameters())[-1].register_hook(spoiler)
            for step in (1, 2, 3):
                spoiler.spoils = step == 2
                before = masters(engine, grid)
                outcome = train_step(engine, [batch] * count, grid, [None] * count)()
                pairs = zip(before, masters(engine, grid), strict=True)
                skipped.append(outcome.skipped)
                norms.append(outcome.grad_norm)
                kept.append(all(torch.equal(a, b) for a, b in pairs))
        return {
            "skipped": skipped,
            "kept": kept,
            "norms": norms,
            "step": type(engine.optimizer).__name__,
            "linear_is_torch's": torch.nn.functional.linear is torch._C._nn.linear,
        }


if __name__ == "__main__":
    with ending.clean_exit():
        group = processes.start_processes()
        found = []
        for one in json.loads(Path(sys.argv[2]).read_text()):
            every: list = [None] * processes.world_size()
            torch.distributed.all_gather_object(every, run(one))
            found.append(every)
        if processes.rank() == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
