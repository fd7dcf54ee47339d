"""Generated checkpoints, read soundly into generated layouts and precisions, are never refused.

READINGS=5000 pytest tests/launch/checkpoints/test_sound_readings.py     tries more
"""

import json
import os
import random
from pathlib import Path

import pytest
from launching import WORKERS, run_ranks

READINGS = int(os.environ.get("READINGS", "100"))
A_MODEL = 96  # readings, at most: 16 states into 6 engines
STATES = 4  # of each source, one after each step
PRECISIONS = {"pure_bf16": "bf16", "fp16_dynamic": "fp16", "fp16_static": "fp16"}
CONFIGS = {
    "adamw": ["zero0", "zero1", "zero2", "zero3", *PRECISIONS],
    "muon": ["zero0", "zero1", "zero2", "zero3"],
    "lamb": ["zero0"],
}


def model(draw):
    """Draw a recipe, settings that sources and readers share, and the optimizer."""
    recipe = draw.choice(["default/sotu", "default/sotu", "bert/sotu", "bert/shared"])
    optimizer = draw.choice(["adamw", "adamw", "adamw", "muon", "lamb"])
    heads = draw.choice([2, 4])
    settings = [f"model.heads={heads}", f"model.hidden={heads * draw.choice([8, 12, 16])}"]
    settings += [f"model.layers={draw.choice([2, 3, 4])}", f"optimizer.name={optimizer}"]
    settings += [f"sequence_length={draw.choice([24, 32, 48])}", "batch.global=4", "run.check_every=0"]
    settings += [f"seed={draw.randrange(10**6)}", f"dropout.hidden={draw.choice([0, 0.1])}"]
    settings += ["optimizer.adam_lr=2e-3"] if optimizer == "muon" else []
    return recipe, settings, optimizer


def case(draw, ranks, recipe, settings, optimizer):
    """Draw a layout and a precision; some are refused when they are resolved."""
    degrees = draw.choice([(ranks, 1, 1), (1, 1, ranks), (1, ranks, 1)])
    config = "pipeline" if degrees[1] > 1 else draw.choice(CONFIGS[optimizer])
    precision = PRECISIONS.get(config) or draw.choice(["fp32", "fp32", "bf16", "bf16", "fp16"])
    sequence = ["parallel.sequence=true"] if degrees[0] > 1 and draw.random() < 0.4 else []
    degrees = dict(zip(("tp", "pp", "dp"), degrees, strict=True))
    how = {"ds_config": config, "precision": precision, "settings": [*settings, *sequence]}
    return {"recipe": recipe, **degrees, **how}


def training(draw):
    values = {
        "optimizer.lr": draw.choice([1e-4, 1e-3, 1e-2, 5e-2]),
        "optimizer.weight_decay": draw.choice([0, 0.1]), "init_std": draw.choice([0.005, 0.02, 0.06]),
        "run.save_every": 1, "run.keep_checkpoints": STATES,
    }  # fmt: skip
    return [f"{key}={value}" for key, value in values.items()]


def launch(out, what, jobs):
    for ranks in (1, 2):
        file = out / f"{what}-{ranks}.json"
        file.write_text(json.dumps([job for number, job in jobs if number == ranks]))
        done = run_ranks(ranks, WORKERS / "readings.py", file, timeout=60 + 10 * READINGS)
        assert done.returncode == 0, done.stdout[-4000:]
    return {job["out"]: json.loads((out / job["out"] / "found.json").read_text()) for _, job in jobs}


@pytest.mark.long
def test_sound_readings_are_never_refused(tmp_path):
    draw = random.Random(READINGS)
    sources, readers = [], []
    for _ in range(-(-READINGS // A_MODEL)):
        recipe, settings, optimizer = model(draw)
        states = []
        for ranks in (1, 1, 2, 2):
            how = case(draw, ranks, recipe, [*settings, *training(draw)], optimizer)
            sources.append((ranks, {"case": how, "steps": STATES, "sources": []}))
            states.append(sources[-1][1])
        for ranks in (1, 1, 1, 2, 2, 2):
            how = case(draw, ranks, recipe, settings, optimizer)
            readers.append((ranks, {"case": how, "steps": STATES, "sources": states}))
    for number, (_, job) in enumerate([*sources, *readers]):
        job["out"] = str(tmp_path / str(number))
    launch(tmp_path, "sources", sources)
    for _, job in readers:
        paths = []
        for source in job["sources"]:
            paths += (Path(source["out"]) / "checkpoints").glob("step-*")
        job["sources"] = draw.sample(sorted(map(str, paths)), len(paths))
        job["steps"] = int(job["sources"][0][-6:])
    found = launch(tmp_path, "readers", readers)
    refusals = {}
    for out, each in found.items():
        for source, why in each.items():
            refusals[f"{out}: {source}"] = why
    assert len(refusals) >= READINGS // 2, "most layouts resolve"
    assert not [*filter(None, refusals.values())], refusals
    print(f"{len(refusals)} readings")
