"""Trains cases under ZeRO-0 and again under ZeRO-1, and runs resumed ones; writes where they differ.

    zero0.py OUT CASES.json      cases: name, tp, dp, precision, fp16 (section of the JSON), settings;
                                 `resuming`'s where they say "resumed"

A gradient norm is a sum in the order of the shards, and its last bit moves every clipped gradient. So that
everything else can be compared bit for bit, both stages clip by the norm rounded to 12 bits; the norms
themselves are recorded before.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import resuming
import torch
from stored import load_weights

from data.corpus import build
from ds_configs.resolver import resolve
from launch.checkpoints import run_checkpoints
from launch.deepspeed_fixes import zero0
from launch.deepspeed_fixes.short_steps import FlatStep
from launch.ranks import ending, processes
from launch.records.facts import RunFacts
from launch.training.job import Job
from launch.training.loop import train as train_run
from launch.training.run import Start
from modeling.parallel.process_grid import ProcessGrid
from recipes import catalog

STEPS = 9
COMMON = (
    "batch.accumulation=2",
    "optimizer.clip=0.5",
    "optimizer.weight_decay=0.1",
    "dropout.hidden=0",
    "dropout.attention=0",
)


@contextlib.contextmanager
def rounded_norms(kind: object, name: str):
    """Round what `kind.name` returns to 12 bits; yields the list of what it returned."""
    original, seen = getattr(kind, name), []

    def rounded(*of):
        norm = original(*of)
        seen.append(float(norm))
        mantissa, exponent = torch.frexp(norm)
        return torch.ldexp((mantissa * 2**12).round(), exponent - 12)

    with mock.patch.object(kind, name, rounded):
        yield seen


def train(case: dict, ds_config: str, out: Path) -> dict:
    """One run: each step's record, each step's scaled gradient norm, and the fp32 weights at the end."""
    degrees = [f"parallel.{degree}={case[degree]}" for degree in ("tp", "dp")]
    settings = [*degrees, *COMMON, f"precision={case['precision']}", *case["settings"]]
    recipe = catalog.load(
        "bert/sotu" if case["name"] == "bert" else catalog.DEFAULT_RECIPE, settings, tiny=True, steps=STEPS
    )
    config = json.loads((Path("ds_configs") / f"{ds_config}.json").read_text())
    config["fp16"].update(case["fp16"])
    # For sums in fp32 DeepSpeed has another optimizer, which rounds where it clips.
    config["data_types"] = {"grad_accum_dtype": case["precision"]}
    directory = out / f"{case['name']}-{ds_config}"
    if processes.rank() == 0:
        directory.mkdir()
        (directory / "ds.json").write_text(json.dumps(config))
    torch.distributed.barrier()
    plan = resolve(recipe, directory / "ds.json", processes.world_size(), resuming.MACHINE)
    records = resuming.Records()
    norm = (zero0, "gradient_norm") if ds_config == "zero0" else (FlatStep, "norm_over_ranks")
    with rounded_norms(*norm) as norms:
        job = Job(RunFacts(plan, case["name"]), directory)
        corpus, grid = build(recipe, say=records.say), ProcessGrid(case["tp"], 1, case["dp"])
        train_run(Start(job, records, corpus, grid))
    torch.distributed.barrier()
    weights = load_weights(run_checkpoints.newest(directory / "checkpoints").directory)
    return {"steps": records.steps, "norms": norms, "weights": weights}


def alike(weight: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, but for the last bit of a few elements.

    torch's fused AdamW computes the last elements of a tensor one by one, with other roundings than those
    that it computes 16 at a time; a shard ends where a parameter does not.
    """
    few = (weight != expected).sum() <= 16
    return bool(few and torch.allclose(weight, expected, rtol=2**-22, atol=1e-9))


def run(case: dict, out: Path) -> None:
    plain, sharded = (train(case, stage, out) for stage in ("zero0", "zero1"))
    weights, expected = plain.pop("weights"), sharded.pop("weights")
    if processes.rank() == 0:
        (out / f"{case['name']}.json").write_text(json.dumps({
            "zero0": plain, "zero1": sharded, "tensors": len(expected),
            "different_weights": [n for n in expected if not alike(weights[n], expected[n])],
        }))  # fmt: skip


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        for one in json.loads(Path(sys.argv[2]).read_text()):
            (resuming.run if one.get("resumed") else run)(one, Path(sys.argv[1]))
