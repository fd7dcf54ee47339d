"""Runs that hang or break: a rank that is stopped, slow or killed, a launcher that is killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, WORKERS, deepspeed, environment, run, run_ranks
from stored import complete_checkpoints

from launch.experiments.launching import free_port, torchrun
from launch.ranks.watchdog import HANGING
from launch.records.metrics import read_metrics
from launch.training.start import NOT_RECORDED

TORCHRUN = torchrun(2)
TINY = ["--tiny", "--ds_config", "zero1", "--set", "precision=fp32"]
ENDLESS = [*TINY, "--set", "steps=100000", "--set", "run.save_every=5", "--set", "run.keep_checkpoints=1"]


def wait_for(condition, what, seconds=180):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s"
        time.sleep(0.1)
    return found


def steps_of(out):
    with contextlib.suppress(OSError):
        return (out / "metrics.jsonl").read_text().count('"kind": "step"')
    return 0


def ranks_of(out):
    """Process ids of the ranks that train into `out`."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{int(entry)}/cmdline").read_text().split("\0")
            of_a_launcher = {"torch.distributed.run", "deepspeed.launcher.launch"} & {*words}
            if str(out) in words and not of_a_launcher and not any(w.endswith("/deepspeed") for w in words):
                found.append(int(entry))
    return sorted(found)


@contextlib.contextmanager
def started(command, out):
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for left in ranks_of(out):  # torchrun's are in sessions of their own
            os.kill(left, signal.SIGKILL)
        process.wait()


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["megarecipes", "transformers"])
def test_a_rank_that_hangs_in_training_is_named(tmp_path, implementation):
    out = tmp_path / "run"
    own = ["--set", "run.hang_after=3", "--set", f"model.implementation={implementation}"]
    what = (*TINY, *own, "--out", out)
    done = run_ranks(2, WORKERS / "hanging_rank.py", *what, timeout=120, kill_after=0.5)
    assert done.returncode == HANGING, done.stdout[-3000:]
    assert "the run hangs in step 5 and is ended" in done.stdout and "rank 1 on " in done.stdout
    assert "does not answer: its process is stopped" in (out / "hang.txt").read_text()
    assert (out / "hang-rank-0.txt").exists() and steps_of(out) == 4
    assert not any((out / "checkpoints").glob("*"))


@pytest.mark.long
def test_a_file_system_that_pauses_hangs_no_run(tmp_path):
    """Rank 0 is at its records for longer than the others' steps may take."""
    own = ["--set", "run.hang_after=1", "--steps", "6", "--out", tmp_path / "run"]
    done = run_ranks(2, WORKERS / "slow_records.py", 8, *TINY, *own, kill_after=0.5)
    assert done.returncode == 0 and steps_of(tmp_path / "run") == 6, done.stdout[-3000:]


def test_records_that_fail_cost_no_weights_and_have_an_exit_code_of_their_own(tmp_path):
    out, config = tmp_path / "run", tmp_path / "monitored.json"
    zero1 = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    config.write_text(json.dumps({**zero1, "wandb": {"enabled": True, "project": "ours"}}))
    how = ("--tiny", "--ds_config", config, "--set", "precision=fp32", "--steps", 4)
    done = run_ranks(2, WORKERS / "failing_records.py", out, *how, timeout=120)
    assert done.returncode == NOT_RECORDED, done.stdout[-3000:]
    assert [c.step for c in complete_checkpoints(out / "checkpoints")] == [4]
    end = done.stdout.rpartition("not all was recorded")[2]
    lost = ("DeepSpeed's monitor", "tensorboard", "result.json", "loss.png", "sample", "metrics.jsonl:5")
    assert not [each for each in lost if each not in end] and "Traceback" not in done.stdout, done.stdout


@pytest.mark.parametrize(("lost", "step"), [(1, 1), pytest.param(0, 3, marks=pytest.mark.long)])
def test_a_lost_rank_ends_those_that_wait_for_their_devices(tmp_path, lost, step):
    """NCCL does not tell them of it; the launcher would let them wait for longer than this test may take."""
    how = (lost, step, *TINY, "--out", tmp_path / "run")
    done = run_ranks(2, WORKERS / "lost_rank.py", *how, timeout=120, kill_after=110)
    assert done.returncode == -signal.SIGKILL and f"rank {lost} " in done.stdout, done.stdout[-3000:]
    assert done.stdout.count("has ended: what it or its machine said last") == 1


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """(output, run directory) of a run whose rank 1 is slow, and has no data for its fourth step."""
    out = tmp_path_factory.mktemp("slow") / "run"
    done = run_ranks(2, WORKERS / "slow_rank.py", *TINY, "--out", out, timeout=120, kill_after=0.1)
    assert done.returncode == 1, done.stdout[-3000:]
    return done.stdout, out


def test_the_metrics_tell_the_slowest_rank(slow):
    records = read_metrics(slow[1] / "metrics.jsonl").steps
    assert len(records) == 3
    for record in records:
        assert record.slowest_rank == 1 and record.rank_seconds_max > 0.3
        assert 0 < record.rank_seconds_min < record.rank_seconds_median < record.rank_seconds_max


def test_a_rank_without_data_ends_the_run_with_a_sentence(slow):
    said, out = slow
    assert "rank 1 of 2 on " in said and "Traceback" not in said, said[-3000:]
    assert said.count("there is no batch for step 4: OSError: planted") == 1 and "--resume" in said
    assert "planted" in (out / "error-rank-1.txt").read_text()


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "deepspeed's own"])
def test_no_orphan_of_a_killed_launcher_trains_on(tmp_path, launcher):
    """It saves and ends. Of deepspeed's launchers the first is the command, and each machine has its own."""
    out = tmp_path / "run"
    command = TORCHRUN if launcher == "torchrun" else deepspeed(2)
    with started([*command, "launch/pretrain.py", *ENDLESS, "--out", str(out)], out) as first:
        wait_for(lambda: steps_of(out) > 6, "step 6")
        ranks = ranks_of(out)
        assert len(ranks) == 2
        second = run([sys.executable, "launch/pretrain.py", *ENDLESS, "--out", str(out)])
        assert second.returncode == 2 and f"process {ranks[0]} on " in second.stdout, second.stdout
        assert f"touch {out / 'STOP'}" in second.stdout
        parent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent if launcher == "deepspeed's own" else first.pid, signal.SIGKILL)
        wait_for(lambda: not ranks_of(out), "the orphans' end", 30)
    assert json.loads((out / "result.json").read_text())["status"] == "interrupted"


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.5, 2, 3.5])
def test_no_orphan_of_a_launcher_killed_at_the_start_waits(tmp_path, seconds):
    out = tmp_path / "run"
    with started([*TORCHRUN, "launch/pretrain.py", *ENDLESS, "--out", str(out)], out) as first:
        wait_for(lambda: len(ranks_of(out)) == 2, "the ranks' start")
        time.sleep(seconds)
        first.kill()
        wait_for(lambda: not ranks_of(out), "the orphans' end", 30)


@pytest.mark.long
def test_torchrun_restarts_a_run_whose_rank_was_killed(tmp_path):
    out = tmp_path / "run"
    flags = [*TINY, "--steps", "6", "--set", "run.save_every=2", "--resume", "--out", str(out)]
    done = run([*TORCHRUN, "--max_restarts", "2", str(WORKERS / "killed_rank.py"), *flags])
    assert done.returncode == 0, done.stdout[-3000:]
    assert "resumed from" in done.stdout and "step-000002" in done.stdout
    assert [record.step for record in read_metrics(out / "metrics.jsonl").steps] == [1, 2, 3, 4, 5, 6]
    assert len(json.loads((out / "environment.json").read_text())["launches"]) == 2


def worker_of(out, rank):
    """Process id of a rank that trains into `out`, by its environment."""
    for pid in ranks_of(out):
        with contextlib.suppress(OSError):
            if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0"):
                return pid
    return None


@pytest.mark.ci
def test_two_agents_restart_all_ranks_when_one_dies(tmp_path):
    """The agent whose worker lives restarts it too, and does not count that: the ranks' counts differ.

    127.0.0.2 is no name of one machine: the ranks know each other by a secret in a file.
    """
    out = tmp_path / "run"
    flags = [*ENDLESS, "--set", "run.prompt=null", "--resume", "--out", str(out)]
    place = ["--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "3", "--local_addr", "127.0.0.2"]
    meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    agent = [sys.executable, "-m", "torch.distributed.run", *place, *meet, "launch/pretrain.py", *flags]
    with started(agent, out) as first, started(agent, out) as second:
        for rank, launches in ((1, 1), (0, 2)):
            wait_for(lambda: len(launches_of(out)) == launches and steps_of(out) > 6, "training")  # noqa: B023
            os.kill(worker_of(out, rank), signal.SIGKILL)
            wait_for(lambda: len(launches_of(out)) > launches, "the restart")  # noqa: B023
        (out / "STOP").touch()
        assert (first.wait(120), second.wait(120)) == (0, 0)
    assert json.loads((out / "result.json").read_text())["status"] == "interrupted"


def launches_of(out):
    with contextlib.suppress(OSError, ValueError):
        return json.loads((out / "environment.json").read_text())["launches"]
    return []
