"""SIGKILL at any moment loses at most the steps since the last whole checkpoint."""

import contextlib
import random
import signal
import subprocess
import time

import psutil
import pytest
from launching import DEVICE, ROOT, deepspeed, environment, run
from stored import complete_checkpoints

from launch.records.metrics import read_metrics

KILLS, STEPS = (8, 200) if DEVICE == "board" else (20, 400)  # the former is slower
FLAGS = [
    "launch/pretrain.py", "--tiny", "--ds_config", "zero2", "--steps", str(STEPS),
    "--set", "run.save_every=1", "--set", "run.keep_checkpoints=2", "--set", "dropout.hidden=0.1",
]  # fmt: skip


def recorded(out):
    path = out / "metrics.jsonl"
    return {s.step: s.loss for s in read_metrics(path).steps} if path.exists() else {}


def victims(launcher):
    """The launcher's process and its two ranks, by what stands in their command lines."""
    every = [launcher, *psutil.Process(launcher.pid).children(recursive=True)]
    ranks = [p for p in every[1:] if "--local_rank" in " ".join(p.cmdline())]
    return ranks, every


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kills_at_random_moments_change_no_number(tmp_path):
    """Of a rank, of the launcher or of all, while every step is written in the background."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    done = run([*deepspeed(2), *FLAGS, "--out", str(whole)], timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    chance = random.Random(0)
    for kill in range(KILLS):
        before = max(recorded(out), default=0)
        process = subprocess.Popen(
            [*deepspeed(2), *FLAGS, "--out", str(out), "--resume"], cwd=ROOT, env=environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 120
        steps = before
        # A resumed run cuts its records back first.
        while steps == before or not recorded(out):
            assert process.poll() is None and time.monotonic() < end, process.communicate()[0][-3000:]
            time.sleep(0.02)
            steps = max(recorded(out), default=0)
        time.sleep(chance.random() / 2)
        kept = max((c.step for c in complete_checkpoints(out / "checkpoints")), default=0)
        ranks, every = victims(process)
        for victim in chance.choice([ranks[:1], ranks[1:], every[:1], every]):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                victim.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        psutil.wait_procs(every[1:], timeout=60)
        assert not any(p.is_running() for p in every[1:]), f"kill {kill}: an orphan"
        newest = max((c.step for c in complete_checkpoints(out / "checkpoints")), default=0)
        assert newest >= kept, f"kill {kill}: a checkpoint is gone"
    done = run([*deepspeed(2), *FLAGS, "--out", str(out), "--resume"], timeout=600)
    assert done.returncode == 0 and "is damaged" not in done.stdout, done.stdout[-3000:]
    assert recorded(out) == recorded(whole)
    sums = [complete_checkpoints(d / "checkpoints")[-1].manifest.files for d in (whole, out)]
    assert sums[0] == sums[1], "the last checkpoints are equal to the byte"
