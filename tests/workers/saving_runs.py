"""Trains tiny runs that save after every step, each with another trouble; writes what happened when.

saving_runs.py OUT.json
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

from launch.console import terminal
from launch.machine import description
from launch.ranks import ending, processes

terminal.quiet_libraries()
MACHINE = description.detect_machine()

from data.corpus import build  # noqa: E402  (after the accelerator is chosen)
from ds_configs.resolver import resolve  # noqa: E402
from launch.checkpoints import manifest, run_checkpoints, shares, tensor_file  # noqa: E402
from launch.experiments.groups import temporary_groups  # noqa: E402
from launch.machine import memory  # noqa: E402
from launch.records.facts import RunFacts, SilentRecorder  # noqa: E402
from launch.training.early_ends import NotSavedError  # noqa: E402
from launch.training.job import Job  # noqa: E402
from launch.training.loop import train  # noqa: E402
from launch.training.run import Start  # noqa: E402
from modeling.parallel.process_grid import ProcessGrid  # noqa: E402
from recipes import catalog  # noqa: E402

write = tensor_file.write
RANK = processes.rank()


class Events(SilentRecorder):
    def __init__(self):
        self.seen = []

    def say(self, text):
        self.seen.append(["say", text])

    def step(self, record):
        self.seen.append(["step", record.step])

    def save(self, saved):
        self.seen.append(["saved", saved.step, saved.background, saved.problem])


def slowly(*what):
    time.sleep(1.5)
    return write(*what)


def full_on(steps):
    """A disk that is full for rank 1 while it writes after these steps."""

    def written(path, entries):
        if RANK == 1 and any(f"step-{step:06d}" in str(path) for step in steps):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, entries)

    return written


def unseen(*what):
    """What rank 1 writes is on another machine's disk."""
    done = write(*what)
    if RANK == 1:
        what[0].unlink()
    return done


SETTINGS = ["run.save_every=1", "run.keep_checkpoints=null", "parallel.dp=2"]
READ_ONLY = mock.Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
CASES = {
    "well": [],
    "slow disk": [(tensor_file, "write", slowly)],
    "little memory": [(memory, "available", lambda: 0.0)],
    "full disk": [(tensor_file, "write", full_on([1, 2]))],
    "full at the end": [(tensor_file, "write", full_on([3]))],
    "not shared": [(tensor_file, "write", unseen)],
    "read-only": [
        (run_checkpoints, "begin", mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    ],
}


def run(name: str, out: Path) -> dict:
    recipe = catalog.load(overrides=SETTINGS, tiny=True, steps=3)
    plan, events = resolve(recipe, "zero1", processes.world_size(), MACHINE), Events()
    grid, error = ProcessGrid(1, 1, 2), None
    with contextlib.ExitStack() as stack:
        for patch in CASES[name]:
            stack.enter_context(mock.patch.object(*patch))
        try:
            train(Start(Job(RunFacts(plan, name), out / name), events, build(recipe, say=events.say), grid))
        except NotSavedError as failed:
            error = failed.why
    sums = {}
    for directory in sorted((out / name / "checkpoints").glob("*")):
        held = manifest.read(directory).files.items()
        sums[directory.name] = {file: stored.crc32 for file, stored in held}
    return {"events": events.seen, "error": error, "files": sums}


if __name__ == "__main__":
    with ending.clean_exit():
        processes.start_processes()
        assert shares.tensor_file is tensor_file
        found = {}
        for case in CASES:
            with temporary_groups():
                found[case] = run(case, Path(sys.argv[1]).parent)
        if RANK == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))
