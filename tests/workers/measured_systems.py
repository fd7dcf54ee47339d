"""Runs the systems of `benchmark.py step` in one process, and writes what they computed.

measured_systems.py OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.ranks import ending, processes
from tools.benchmarks.specification import Specification
from tools.benchmarks.systems import SYSTEMS, MeasuredSystem

STEPS = 2
GPT = ("precision=fp32", "batch.accumulation=2")


def spec(system: str, recipe: str, config: str = "zero1", settings: tuple[str, ...] = GPT) -> Specification:
    return Specification(system, system, recipe, settings, tiny=True, ds_config=config)


def followed(system: MeasuredSystem) -> dict:
    """Losses and work of the first steps."""
    found = {"losses": [], "work": []}
    for _ in range(STEPS):
        (work,) = system.run(1)
        found["losses"].append(system.loss)
        found["work"].append(work[1:])
    return found


def run(out: Path) -> None:
    names = ("ours", "bare", "nano", "transformers")
    found = {name: followed(SYSTEMS[name](spec(name, "default/sotu"))) for name in names}
    partitioned = spec("transformers", "default/sotu", "zero3")
    found["transformers zero3"] = followed(SYSTEMS["transformers"](partitioned))
    for name in ("ours", "bare", "transformers"):
        settings = ("precision=fp32", "optimizer.clip=1000")
        found[f"{name} bert"] = followed(SYSTEMS[name](spec(name, "bert/sotu", settings=settings)))
    found["rate"] = SYSTEMS["rate"](spec("rate", "bert/sotu", settings=())).run(1)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        run(Path(sys.argv[1]))
