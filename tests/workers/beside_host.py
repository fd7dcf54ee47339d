"""Trains as any_layout.py does, on a CPU that says it computes beside its host, as a GPU does.

Leaves engine.json in each run's directory: its optimizer, and the number of layers that ZeRO-3 gathers whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ds_configs.plan import Device
from launch.ranks import ending, processes

processes.device = lambda: Device("cpu", asynchronous=True, own_memory=False)

import any_layout  # noqa: E402  (it asks for the device)
from deepspeed.utils import z3_leaf_module  # noqa: E402

from launch.training import loop  # noqa: E402

build_engine = loop.build_engine


def build(job, *args, **named):
    engine = build_engine(job, *args, **named)
    facts = {
        "optimizer": type(engine.optimizer).__name__,
        "overlaps": getattr(engine.optimizer, "overlap_comm", None),
        "whole": sum(map(z3_leaf_module, engine.module.modules())),
    }
    if processes.rank() == 0:
        job.directory.mkdir(exist_ok=True)
        (job.directory / "engine.json").write_text(json.dumps(facts))
    return engine


if __name__ == "__main__":
    loop.build_engine = build
    with ending.clean_exit():
        any_layout.main(Path(sys.argv[1]))
