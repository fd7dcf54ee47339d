"""Count the messages between the ranks' hosts in each step of runs on a stream that save meanwhile.

    host_messages.py OUT.json SETTING...     settings of a recipe that streams

Writes for each layout the calls of each step: the collective's name, and whether it is asynchronous.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from data import corpus
from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.checkpoints import tensor_file
from launch.experiments.groups import temporary_groups
from launch.ranks import ending, processes
from launch.ranks.meeting import Meeting
from launch.ranks.ranks_meeting import RanksMeeting
from launch.records.facts import RunFacts, SilentRecorder
from launch.training import agreement
from launch.training.job import Job
from launch.training.loop import train
from launch.training.run import Start
from modeling.parallel.process_grid import ProcessGrid
from recipes import catalog

CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=True)
NAMES = ("all_reduce", "broadcast", "all_gather_object", "gather_object", "broadcast_object_list", "barrier")
SAVED_AT, ON_DISK_AT, STEPS = 4, 7, 8
OWN = [
    "run.check_every=0",
    f"run.save_every={SAVED_AT}",
    "run.save_every_minutes=1000",
    "run.save_last=false",
]


class Events(SilentRecorder):
    """Takes the calls of each step; lets the checkpoint's file be written after step ON_DISK_AT."""

    def __init__(self):
        self.calls, self.steps, self.on_disk = [], {}, threading.Event()

    def step(self, record):
        self.steps[record.step], self.calls = self.calls, []
        if record.step == ON_DISK_AT:
            self.on_disk.set()

    def counted(self, name, call, group):
        def counting(*given, **named):
            if group in (*given, *named.values()):
                self.calls.append([name, bool(named.get("async_op"))])
            return call(*given, **named)

        return counting


def calls_of_steps(case: dict, settings: list[str], meeting: Meeting, out: Path) -> dict:
    of = [f"parallel.{axis}={degree}" for axis, degree in case.items()]
    recipe = catalog.load(catalog.DEFAULT_RECIPE, [*settings, *OWN, *of], tiny=True, steps=STEPS)
    plan, events = resolve(recipe, "zero1", processes.world_size(), CPU), Events()
    with temporary_groups():
        grid = ProcessGrid(*case.values(), processes.TIMEOUT)
        built = meeting.all_or_none(lambda: corpus.build(recipe, say=lambda line: None, once=meeting.once))

        def write(*what, write=tensor_file.write):
            assert events.on_disk.wait(60)
            return write(*what)

        places = [(dist, name) for name in NAMES] + [(agreement, "all_gather")]
        patches = [(tensor_file, "write", write)]
        patches += [(at, n, events.counted(n, getattr(at, n), grid.control_group)) for at, n in places]
        for patch in patches:
            mock.patch.object(*patch).start()
        train(Start(Job(RunFacts(plan, "host messages"), out), events, built, grid))
        mock.patch.stopall()
    return events.steps


if __name__ == "__main__":
    out, *given = sys.argv[1:]
    with ending.clean_exit():
        met = RanksMeeting()
        met.all_or_none(lambda: None)
        processes.start_processes(store=met.store)
        found = []
        for case in {"tp": 1, "pp": 1, "dp": 2}, {"tp": 2, "pp": 1, "dp": 1}:
            found.append(calls_of_steps(case, given, met, Path(out).parent / f"tp{case['tp']}"))
        if processes.rank() == 0:
            Path(out).write_text(json.dumps(found))
