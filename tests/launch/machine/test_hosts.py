"""Checks of what connects machines: their names, the hostfile, variables that travel."""

import socket

import pytest

from launch.machine import hosts
from recipes.files import FileError


def written(tmp_path, *lines):
    (tmp_path / "hosts").write_text("\n".join(lines))
    return hosts.read_hosts(tmp_path / "hosts")


def test_a_hostfile_is_read_as_the_launcher_reads_it(tmp_path):
    from deepspeed.launcher.runner import _parse_hostfile

    lines = ["# ours", "", "  node1 slots=4", "node2\tslots=2 # old"]
    found = written(tmp_path, *lines)
    assert found.slots == _parse_hostfile(lines) == {"node1": 4, "node2": 2} and found.total == 6
    assert not found.problems
    for wrong in ("node3", "node3 slots=x", "node3 slots = 4", "node1 slots=4", "#only"):
        with pytest.raises(ValueError, match="[Hh]ostfile"):
            _parse_hostfile([wrong] if wrong[0] == "#" else ["node1 slots=4", wrong])
        bad = written(tmp_path, wrong) if wrong[0] == "#" else written(tmp_path, "node1 slots=4", wrong)
        assert len(bad.problems) == 1, wrong
    assert written(tmp_path, "node1 slots=99999").problems, "no machine has so many GPUs"
    with pytest.raises(FileError, match="no such file"):
        hosts.read_hosts(tmp_path / "none")


def test_all_of_a_hostfile_is_judged_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "resolved", lambda name: None if name == "gone" else "10.0.0.4")
    good = written(tmp_path, "node1 slots=8", "node2 slots=8")
    monkeypatch.setattr(hosts.shutil, "which", lambda program: f"/usr/bin/{program}")
    assert [check.found for check in hosts.hostfile(good, devices=0)] == ["2 machines, 16 slots"]
    assert hosts.reachable(good).verdict == "not checked" and hosts.environment({}).verdict == "ok"
    own = socket.gethostname()
    bad = written(tmp_path, f"{own} slots=8", "gone slots=8", "127.0.0.1 slots=8", "x", f"{own} slots=1")
    found = hosts.hostfile(bad, devices=4)
    said = "\n".join(check.found for check in found)
    assert len(found) == 4 and {check.verdict for check in found} == {"failed"}
    for piece in ("hosts:4: x", "hosts:5", "slots=8 for this machine, which has 4 GPUs", "127.0.0.1 among"):
        assert piece in said
    assert hosts.reachable(bad).found.startswith("gone cannot be resolved")
    monkeypatch.setattr(hosts.shutil, "which", lambda program: None)
    assert "pdsh" in hosts.reachable(good).fix


def test_variables_that_other_machines_do_not_get(tmp_path, monkeypatch):
    environ = {"NCCL_DEBUG": "INFO", "HOME": "/", "DS_ACCELERATOR": "cpu"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = hosts.environment(environ)
    assert found.verdict == "warning" and "hand DS_ACCELERATOR to" in found.found
    (tmp_path / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\n")
    assert hosts.environment(environ).verdict == "ok"
