"""Losses of recipes that follow DeepSpeed JSONs, next to those of plain `deepspeed.initialize` loops.

    followed.py OUT.json CASES.json      cases: name -> JSON of DeepSpeed; its "filled": for the plain loop

Both train the same module on the same batches in fp32. The plain engine has DeepSpeed's own optimizer,
schedule, clipping and accumulation.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine()

import deepspeed  # noqa: E402  (after the accelerator is chosen)

from data.corpus import build  # noqa: E402
from ds_configs.resolver import followed, resolve  # noqa: E402
from launch.training import engine as training  # noqa: E402
from launch.training import micro_batches  # noqa: E402
from launch.training.build_model import build_module  # noqa: E402
from launch.training.micro_batches import training_batches  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402

STEPS = 6
SETTINGS = ["model.layers=2", "model.hidden=32", "dropout={hidden: 0, attention: 0}"]


def steps_of(plan, corpus, grid, device) -> list[list]:
    """The micro-batches of the first steps."""
    reader = training_batches(plan, corpus, grid, None)
    taken = [copy.deepcopy(next(reader)) for _ in range(STEPS)]
    reader.close()
    return [micro_batches.normalise(batches, grid, device) for batches in taken]


def ours(plan, grid, corpus) -> list[float]:
    engine = training.initialize(plan, build_module(plan, grid, None), grid)
    losses = []
    with training.release_at_end(engine):
        for batches in steps_of(plan, corpus, grid, engine.device):
            losses.append(training.train_step(engine, batches, grid, [None] * len(batches))().loss)
    return losses


def plain(config: dict, plan, grid, corpus) -> list[float]:
    module = build_module(plan, grid, None)
    groups = training.parameter_groups(module, plan.recipe.optimizer.weight_decay)
    config = copy.deepcopy(config)
    if config["optimizer"]["params"].get("torch_adam"):
        config["optimizer"]["params"]["fused"] = True  # as ours: torch's other kernels round otherwise
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
    losses = []
    with training.release_at_end(engine):
        engine.train()
        for batches in steps_of(plan, corpus, grid, engine.device):
            of_step = []
            for batch in batches:
                loss = training.forward(engine, batch)[0]
                engine.backward(loss)
                engine.step()
                of_step.append(float(loss))
            losses.append(sum(of_step) / len(of_step))
    return losses


def compare(config: dict, out: Path) -> dict[str, list[float]]:
    """The losses of both."""
    filled = config.pop("filled", config)
    path = out.parent / "followed.json"
    path.write_text(json.dumps(config))
    recipe = catalog.load(overrides=SETTINGS, tiny=True)
    taken = {each.key: each.value for each in followed(recipe, path, 1)}
    recipe = catalog.load(overrides=SETTINGS, tiny=True, settings=taken)
    plan = resolve(recipe, path, 1, MACHINE)
    grid = ProcessGrid(1, 1, 1)
    corpus = build(recipe, say=lambda text: None)
    return {"ours": ours(plan, grid, corpus), "plain": plain(filled, plan, grid, corpus)}


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        out = Path(sys.argv[1])
        cases = json.loads(Path(sys.argv[2]).read_text())
        out.write_text(json.dumps({name: compare(config, out) for name, config in cases.items()}))
