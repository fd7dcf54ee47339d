"""Two nodes on this machine, each with a home directory of its own, train one run; or say why they do not."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, WORKERS, environment, run_ranks
from rank_server import free_port
from srun_task import srun_environment

from data.durable_files import cache_directory
from launch.records.metrics import read_metrics

SCRIPT = str(ROOT / "launch" / "pretrain.py")
TINY = ["--tiny", "--steps", "4", "--set", "precision=fp32", "--ds_config", "zero1"]
BIN = Path(sys.executable).parent


def losses(directory):
    return [record.loss for record in read_metrics(directory / "metrics.jsonl").steps]


@pytest.fixture(scope="module")
def cache():
    """Where vocabulary and tokens are, which rank 0 alone is told."""
    return {"MEGARECIPES_CACHE": str(cache_directory())}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """Losses of the recipe in one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    done = run_ranks(1, SCRIPT, *TINY, "--out", out, env=cache)
    assert done.returncode == 0, done.stdout[-3000:]
    return losses(out)


@pytest.mark.long
def test_tasks_of_srun_on_two_nodes_train_one_run(tmp_path, cache, alone):
    """The second node has an empty home, and its environment from rank 0."""
    out = tmp_path / "run"
    done = run_ranks(2, WORKERS / "srun_task.py", 1, tmp_path, SCRIPT, *TINY, "--out", out, env=cache)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "has from rank 0's machine: MEGARECIPES_CACHE" in done.stdout
    assert not (tmp_path / "node002" / "cache").exists(), "and it takes what that names"
    assert losses(out) == pytest.approx(alone, abs=1e-5) and len(alone) == 4
    assert json.loads((out / "result.json").read_text())["layout"]["dp"] == 2


def test_a_batch_script_says_that_srun_was_forgotten(tmp_path):
    job = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    done = run_ranks(1, SCRIPT, *TINY, "--set", "parallel.dp=8", "--out", tmp_path / "run", env=job)
    assert done.returncode == 2 and "1 process started" in done.stdout
    assert "this is one process, in a job of 8 tasks (SLURM_NTASKS)" in done.stdout


# --- processes of their own


@contextlib.contextmanager
def started(commands, environments, tmp_path, cwds=None):
    """The commands, running; their outputs in tmp_path/output-N.txt."""
    processes = []
    for number, (command, env) in enumerate(zip(commands, environments, strict=True)):
        with open(tmp_path / f"output-{number}.txt", "w") as file:
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment(env),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd=cwds[number] if cwds else ROOT,
                )  # fmt: skip
            )
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to sessions of their own
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def said(tmp_path, number):
    return (tmp_path / f"output-{number}.txt").read_text(errors="replace")


def codes(processes, seconds=150):
    deadline = time.monotonic() + seconds
    return [process.wait(max(1, deadline - time.monotonic())) for process in processes]


def home(tmp_path, node):
    """The environment of a node with a home of its own."""
    place = tmp_path / f"home-{node}"
    place.mkdir(exist_ok=True)
    return {"HOME": str(place), "XDG_CACHE_HOME": str(place / "cache")}


def tasks(tmp_path, count, per_node, extra=(), **more):
    """Environments of `count` tasks of srun, whose nodes have homes of their own."""
    # These nodes' names do not resolve here: as a job script does that wants another network.
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **dict(extra), **more}
    return [
        {**srun_environment(task, count, per_node), **home(tmp_path, task // per_node), **where}
        for task in range(count)
    ]


@pytest.mark.long
def test_plain_python_under_srun_trains_as_torchrun_does(tmp_path, cache):
    """Four tasks on two nodes, tp 2 x dp 2, with what each node prepares for itself."""
    flags = [*TINY, "--set", "parallel.tp=2"]
    command = [sys.executable, SCRIPT, *flags, "--out", str(tmp_path / "srun")]
    with started([command] * 4, tasks(tmp_path, 4, 2), tmp_path) as processes:
        assert codes(processes) == [0] * 4, said(tmp_path, 0)[-3000:]
    done = run_ranks(4, SCRIPT, *flags, "--out", tmp_path / "torchrun", env=cache)
    assert done.returncode == 0 and losses(tmp_path / "srun") == losses(tmp_path / "torchrun")
    assert (tmp_path / "home-1" / "cache" / "megarecipes").exists()


@pytest.mark.long
def test_torchrun_on_two_nodes(tmp_path, cache, alone):
    """Each torchrun is itself the one task of its node, and keeps its own variables."""
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"),
        *(*rendezvous, "--local_addr", "127.0.0.1", SCRIPT, *TINY, "--out", str(tmp_path / "run")),
    ]
    environments = [{**srun_environment(n, 2, 1), **home(tmp_path, n), **cache} for n in range(2)]
    with started([command] * 2, environments, tmp_path) as processes:
        assert codes(processes) == [0, 0], said(tmp_path, 0)[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(alone, abs=1e-5)


@pytest.mark.long
def test_the_hostfile_of_deepspeed_without_ssh(tmp_path, cache, alone):
    """Started by hand on each node; the second has another address, and none of the first's variables."""
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    launcher = [str(BIN / "deepspeed"), "--hostfile", str(tmp_path / "hostfile"), "--no_ssh"]
    where = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    commands = [
        [*launcher, "--node_rank", str(n), *where, SCRIPT, *TINY, "--out", str(tmp_path / "run")]
        for n in range(2)
    ]
    environments = [{**home(tmp_path, 0), **cache}, home(tmp_path, 1)]
    with started(commands, environments, tmp_path) as processes:
        assert codes(processes) == [0, 0], said(tmp_path, 0)[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(alone, abs=1e-5)
    assert f"{socket.gethostname()} has from rank 0's machine: MEGARECIPES_CACHE" in said(tmp_path, 1)


@pytest.mark.long
def test_without_a_shared_file_system_every_rank_refuses(tmp_path, cache):
    """Each node has a directory of its own by that name."""
    folders = [tmp_path / f"node-{task // 2}" for task in range(4)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    command = [sys.executable, SCRIPT, *TINY, "--out", "run"]
    with started([command] * 4, tasks(tmp_path, 4, 2, **cache), tmp_path, folders) as processes:
        assert codes(processes) == [2] * 4, said(tmp_path, 0)[-3000:]
    assert f"{folders[2]}/run does not hold what rank 0 has just written" in said(tmp_path, 0)
    assert "(ranks 2, 3):" in said(tmp_path, 0) and "Traceback" not in said(tmp_path, 0)


@pytest.mark.long
def test_a_rank_that_is_killed_on_another_node_ends_all(tmp_path, cache):
    """srun itself leaves the others running, unless it is told --kill-on-bad-exit."""
    out = tmp_path / "run"
    endless = [*TINY[:1], *TINY[3:], "--set", "steps=100000", "--set", "run.hang_after=10"]
    command = [sys.executable, SCRIPT, *endless, "--out", str(out)]
    with started([command] * 4, tasks(tmp_path, 4, 2, **cache), tmp_path) as processes:
        _wait_for_steps(out, 5)
        processes[3].kill()
        assert codes(processes, 90) == [1, 1, 1, -signal.SIGKILL]
    assert f"rank 3 on {socket.gethostname()} (pid {processes[3].pid}) has ended" in said(tmp_path, 0)
    told = [said(tmp_path, task) for task in range(4)]
    assert sum("has ended" in text for text in told) == 1, "only one rank says it"
    assert not any("Traceback" in text for text in told)


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_a_signal_to_all_tasks_saves_and_can_be_resumed(tmp_path, cache, name):
    """As Slurm sends it before the time is over: exit code 0, and a status by which a script starts again."""
    out = tmp_path / "run"
    endless = [*TINY[:1], *TINY[3:], "--set", "steps=100000"]
    command = [sys.executable, SCRIPT, *endless, "--out", str(out), "--resume"]
    environments = tasks(tmp_path, 2, 1, **cache)
    with started([command] * 2, environments, tmp_path) as processes:
        _wait_for_steps(out, 3)
        for process in processes:
            process.send_signal(getattr(signal, name))
        assert codes(processes) == [0, 0], said(tmp_path, 0)[-3000:]
    assert json.loads((out / "result.json").read_text())["status"] == "interrupted"
    stopped = len(losses(out))
    with started([command] * 2, environments, tmp_path) as processes:
        _wait_for_steps(out, stopped + 2)
        for process in processes:
            process.send_signal(getattr(signal, name))
        assert codes(processes) == [0, 0], said(tmp_path, 0)[-3000:]
    assert "resumed from" in said(tmp_path, 0)


def _wait_for_steps(out, count, seconds=90):
    deadline = time.monotonic() + seconds
    while not (out / "metrics.jsonl").exists() or len(losses(out)) < count:
        assert time.monotonic() < deadline, f"no step {count}"
        time.sleep(0.2)
