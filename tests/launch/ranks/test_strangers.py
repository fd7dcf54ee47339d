"""Another user of the machine reaches nothing of a run by its ports, and does not disturb it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, WORKERS, environment

from launch.experiments.launching import torchrun
from launch.records.metrics import read_metrics
from launch.records.result import read_result

TORCHRUN = torchrun(2)
LISTENING = "0A"  # linux/net/tcp_states.h


def listening_ports(pids) -> dict[int, str]:
    """Return the ports at which processes listen, and their addresses in the kernel's hexadecimal form."""
    links = [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = set()
    for link in links:
        with contextlib.suppress(FileNotFoundError):  # a file that is closed by now is no listening socket
            found = re.match(r"socket:\[(\d+)\]", os.readlink(link))
            if found:
                inodes.add(found[1])
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == LISTENING and cells[9] in inodes:
                address, port = cells[1].split(":")
                ports[int(port, 16)] = address
    return ports


def children_of(pid) -> list[int]:
    text = subprocess.run(["pgrep", "-P", str(pid)], stdout=subprocess.PIPE, text=True).stdout
    return [int(child) for child in text.split()]


@pytest.mark.ci
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="ports are found as Linux tells them")
def test_a_stranger_changes_nothing(tmp_path):
    out, harm = tmp_path / "run", tmp_path / "open" / "harm"
    tmp_path.chmod(0o755)
    harm.parent.mkdir()
    harm.parent.chmod(0o777)
    flags = [
        "--tiny",
        "--steps",
        "100000",
        "--ds_config",
        "zero1",
        "--set",
        "parallel.dp=2",
        "--out",
        str(out),
    ]
    command = [*TORCHRUN, "launch/pretrain.py", *flags]
    run = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 100
        while not (out / "metrics.jsonl").exists() or not read_metrics(out / "metrics.jsonl").steps:
            assert time.monotonic() < deadline and run.poll() is None, run.communicate()[0]
            time.sleep(0.2)
        ranks = children_of(run.pid)
        assert len(ranks) == 2
        loopback = {"0100007F"}
        assert {*listening_ports(ranks).values()} == loopback, "torchrun itself listens everywhere"
        ports = [*listening_ports(ranks), *listening_ports([run.pid])]
        command = [sys.executable, str(WORKERS / "stranger.py"), str(harm), *map(str, ports)]
        made = subprocess.run(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, timeout=100
        )
        assert made.returncode == 0 and made.stdout.count("\n") == 9, made.stdout
        before = len(read_metrics(out / "metrics.jsonl").steps)
        time.sleep(6.5)  # a death is told after 5 s
        assert run.poll() is None and len(read_metrics(out / "metrics.jsonl").steps) > before
        (out / "STOP").touch()
        said, _ = run.communicate(timeout=60)
    finally:
        run.send_signal(signal.SIGKILL)
    assert run.returncode == 0 and read_result(out / "result.json").status == "interrupted", said
    assert not harm.exists() and "\x1b" not in said and "Exception" not in said, said
