"""Fine-tunes cases one after the other and keeps losses, scores and logits of each.

finetuning.py OUT CASES.json      a list; of each case: name, task, init, files, settings, ds_config, steps
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine(emulated_fp16=False)

from data.tasks.corpus import build  # noqa: E402  (after the accelerator is chosen)
from ds_configs.resolver import resolve  # noqa: E402
from launch.evaluation.finetuning_predictions import predict  # noqa: E402
from launch.evaluation.finetuning_recipe import Wishes, recipe_of  # noqa: E402
from launch.evaluation.pretrained import encoder_in  # noqa: E402
from launch.experiments.parity.groups import temporary_groups  # noqa: E402
from launch.records.facts import SilentRecorder  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.loop import train  # noqa: E402
from launch.training.run import Start  # noqa: E402
from launch.weights.initial_weights import InitialWeights  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes.catalog import cut_to  # noqa: E402


class Records(SilentRecorder):
    """Losses of steps and of validations."""

    def __init__(self):
        self.losses, self.validations = [], []

    def step(self, record):
        self.losses.append(record.loss)

    def validation(self, step, outcome, kind="validation"):
        self.validations.append([outcome.loss, outcome.parts["accuracy"]])


def finetune(out: Path, case: dict) -> None:
    weights = InitialWeights(case["init"])
    wishes = Wishes(
        case["task"], case["files"], settings=case["settings"], batch=8, lr=1e-3, sequence_length=32
    )
    given = *encoder_in(weights), MACHINE
    corpus = build(recipe_of(wishes, *given), say=lambda text: None)
    recipe = cut_to(recipe_of(wishes, *given, examples=len(corpus.train)), case["steps"])
    plan, records = resolve(recipe, case["ds_config"], processes.world_size(), MACHINE), Records()
    directory, scores = out / case["name"], []
    grid = ProcessGrid(plan.layout.tp, plan.layout.pp, plan.layout.dp)
    job = Job(plan, case["name"], directory, initial_weights=weights)
    train(Start(job, records, corpus, grid), lambda run: scores.extend(predict(run, corpus)))
    if processes.rank() == 0:
        reported = vars(records) | {"scores": {each.split: each.metrics for each in scores}}
        (directory / "reported.json").write_text(json.dumps(reported))


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for case in json.loads(Path(sys.argv[2]).read_text()):
            with temporary_groups():
                finetune(Path(sys.argv[1]), case)
