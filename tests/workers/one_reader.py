"""Batches of a stream on ranks of a layout, of which one in each model copy reads.

    one_reader.py OUT CASES.json SETTING...     cases: tp, pp and dp; settings of a recipe that streams

Each rank writes `OUT/rank-N.json`: for each case the digests of its batches, its position after them, and
what it has read itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from data import corpus
from data.loader import batch_digest
from data.samples import streamed_splits
from data.samples.lanes import StreamedSamples
from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.experiments.groups import temporary_groups
from launch.ranks import ending, processes
from launch.ranks.meeting import Meeting
from launch.ranks.ranks_meeting import RanksMeeting
from launch.training.early_ends import BrokenData
from launch.training.micro_batches import next_step, training_batches
from modeling.parallel.process_grid import ProcessGrid
from recipes import catalog

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=True)
READ = {"heads": 0, "samples": 0}
STEPS = 3


def counted(function, what):
    def call(*given, **named):
        READ[what] += 1
        return function(*given, **named)

    return call


def batches_of(case: dict, settings: list[str], meeting: Meeting) -> dict:
    READ.update(heads=0, samples=0)
    of = [f"parallel.{axis}={degree}" for axis, degree in case.items()]
    recipe = catalog.load(catalog.DEFAULT_RECIPE, [*settings, *of], tiny=True)
    plan = resolve(recipe, "zero1" if case["pp"] == 1 else "pipeline", processes.world_size(), CPU)
    with temporary_groups():
        grid = ProcessGrid(*case.values(), processes.TIMEOUT)
        built = meeting.all_or_none(lambda: corpus.build(recipe, say=lambda line: None, once=meeting.once))
        batches = training_batches(plan, built, grid, None)
        digests = []
        for _ in range(STEPS):
            peeked = batch_digest(batches.peek()[0])
            digests.append(batch_digest(next(batches)))
            assert peeked == digests[-1], "to look at a step leaves it the next one"
        found = {"digests": digests, "step": batches.step, "state": batches.state(), "read": dict(READ)}
        found["next"] = next_step(plan, batches, grid, batches.step)
        next(batches)
        batches.close()
        found["refused"] = refused(batches, lambda: next_step(plan, batches, grid, batches.step))
    return found


def refused(batches, sum_of_next) -> list:
    """What this rank hears once the first rank's loader is closed: of a peek, a sum and the step."""

    def told(ask):
        try:
            return ask()
        except BrokenData as error:
            return error.why

    return [told(batches.peek), told(sum_of_next), told(lambda: next(batches))]


if __name__ == "__main__":
    out, cases, *given = sys.argv[1:]
    with ending.clean_exit():
        streamed_splits.read_head = counted(streamed_splits.read_head, "heads")
        StreamedSamples.take = counted(StreamedSamples.take, "samples")
        met = RanksMeeting() if processes.world_size() > 1 else Meeting()
        met.all_or_none(lambda: None)
        processes.start_processes(store=met.store)
        kept = [batches_of(case, given, met) for case in json.loads(Path(cases).read_text())]
        (Path(out) / f"rank-{processes.rank()}.json").write_text(json.dumps(kept))
