"""Saving while training goes on, and what a bad disk does to a run."""

import json
import subprocess
import sys

import pytest
from launching import WORKERS, run, run_ranks
from stored import complete_checkpoints

from launch.records.metrics import read_metrics


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("saving") / "found.json"
    done = run_ranks(2, WORKERS / "saving_runs.py", out, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(out.read_text())


def order(run):
    return [event[:2] for event in run["events"] if event[0] != "say"]


def problems(run):
    return {event[1]: event[3] for event in run["events"] if event[0] == "saved"}


@pytest.mark.long
def test_every_save_is_completed(runs):
    run = runs["well"]
    assert list(run["files"]) == ["step-000001", "step-000002", "step-000003"] and run["error"] is None
    assert problems(run) == {1: None, 2: None, 3: None}


@pytest.mark.long
def test_the_next_step_does_not_wait_for_the_disk_and_the_next_save_does(runs):
    seen = order(runs["slow disk"])
    assert seen == [
        ["step", 1], ["step", 2], ["saved", 1], ["step", 3], ["saved", 2], ["saved", 3],
    ]  # fmt: skip
    assert runs["slow disk"]["files"] == runs["well"]["files"]
    assert all(event[2] for event in runs["slow disk"]["events"] if event[0] == "saved")


@pytest.mark.long
def test_with_little_memory_training_waits_and_says_so_once(runs):
    run = runs["little memory"]
    assert [event[2] for event in run["events"] if event[0] == "saved"] == [False] * 3
    said = [event[1] for event in run["events"] if event[0] == "say" and "waits for the disk" in event[1]]
    assert len(said) == 1 and "0 MB that are free" in said[0]
    assert run["files"] == runs["well"]["files"], "the same bytes"


@pytest.mark.long
def test_a_full_disk_of_one_rank_costs_a_checkpoint_and_not_the_run(runs):
    run = runs["full disk"]
    found = problems(run)
    assert found[3] is None and run["error"] is None and list(run["files"]) == ["step-000003"]
    for step in (1, 2):
        assert found[step].startswith("rank 1: ") and "No space left on device" in found[step]
        assert "rank-00001.safetensors" in found[step] and "MB are free" in found[step]
    assert [event for event in order(run) if event[0] == "step"] == [["step", 1], ["step", 2], ["step", 3]]


@pytest.mark.long
def test_a_last_save_that_fails_ends_the_run_with_the_reason(runs):
    run = runs["full at the end"]
    assert "rank 1: " in run["error"] and "No space left" in run["error"]
    assert list(run["files"]) == ["step-000001", "step-000002"], "nothing half written is left"


@pytest.mark.long
def test_a_run_directory_that_is_not_shared_is_said(runs):
    run = runs["not shared"]
    assert run["files"] == {} and "which rank 1 wrote" in run["error"] and "share" in run["error"]


@pytest.mark.long
def test_a_read_only_directory_is_said(runs):
    run = runs["read-only"]
    assert run["files"] == {} and "Read-only file system" in run["error"]
    assert [event for event in order(run) if event[0] == "step"] == [["step", 1], ["step", 2], ["step", 3]]


@pytest.mark.long
def test_a_disk_that_fills_up(tmp_path):
    """A real one of 8 MB, of which a checkpoint takes 2.9 MB and logs the rest."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount a file system")
    try:
        flags = ["--ds_config", "zero1", "--tiny", "--set", "run.save_every=4"]
        command = [sys.executable, "launch/pretrain.py", *flags, "--out", str(disk / "run")]
        done = run(command)
        assert done.returncode == 1 and "Traceback" not in done.stdout, done.stdout[-3000:]
        assert "WARNING: no checkpoint of step 12: rank 0" in done.stdout
        assert "the last checkpoint could not be written" in done.stdout
        assert json.loads((disk / "run" / "result.json").read_text())["status"] == "not saved"
        records = read_metrics(disk / "run" / "metrics.jsonl")
        assert len(records.steps) == 20
        assert [save.problem is None for save in records.saves] == [True, True, False, False, False]
        assert [c.step for c in complete_checkpoints(disk / "run" / "checkpoints")] == [4, 8]
    finally:
        subprocess.run(["umount", disk], check=True)
