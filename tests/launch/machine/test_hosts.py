"""Checks of what connects machines: names, port, hostfile, variables that travel."""

import socket

import pytest

from launch.machine import hosts
from launch.ranks import processes
from recipes.files import FileError


@pytest.fixture(autouse=True)
def nobody_launched_the_tests(monkeypatch):
    for name in (*processes.VARIABLES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_a_taken_port_names_a_free_one():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        number = other.getsockname()[1]
        found = hosts.port({"MASTER_PORT": str(number)})
        assert found.verdict == "failed" and "--master_port" in found.fix and str(number) in found.found
        agent = {"MASTER_PORT": str(number), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert hosts.port(agent).verdict == "not checked"
    assert hosts.port({"MASTER_PORT": "99999"}).verdict == "failed"


def test_a_port_that_outgoing_connections_may_take(monkeypatch):
    monkeypatch.setattr(hosts, "why_taken", lambda number: None)
    monkeypatch.setattr(hosts, "lent_ports", lambda: (32768, 60999))
    assert hosts.port({"MASTER_PORT": "40000"}).verdict == "warning"
    assert hosts.port({}).verdict == "ok"


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
    monkeypatch.setattr(hosts, "addresses", lambda name: [] if name == "gone" else ["10.0.0.4"])
    good = written(tmp_path, "node1 slots=8", "node2 slots=8")
    monkeypatch.setattr(hosts.shutil, "which", lambda program: f"/usr/bin/{program}")
    assert [check.found for check in hosts.hostfile(good, devices=0)] == ["2 machines, 16 slots"]
    assert hosts.reachable(good).verdict == "not checked" and hosts.environment(good, {}).verdict == "ok"
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
    there, environ = (
        written(tmp_path, "a slots=1", "b slots=1"),
        {"NCCL_DEBUG": "INFO", "HOME": "/", "DS_ACCELERATOR": "cpu"},
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = hosts.environment(there, environ)
    assert found.verdict == "warning" and "hand DS_ACCELERATOR to" in found.found
    (tmp_path / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\n")
    assert hosts.environment(there, environ).verdict == "ok"


def test_which_launch_is_on_several_machines(tmp_path, monkeypatch):
    assert hosts.several_machines(written(tmp_path, "a slots=1", "b slots=1"), {})
    assert not hosts.several_machines(written(tmp_path, "a slots=8"), {})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    several = hosts.several_machines
    assert several(None, {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4"})
    assert not several(None, {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}), "all on this one"
    assert not several(None, {"MASTER_ADDR": "10.0.0.4"}), "nothing says how many are here"


def test_a_host_name_that_is_the_loopback_fails_on_several_machines(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(hosts, "addresses", lambda name: ["127.0.1.1"])
    assert hosts.host_name(several=False).verdict == "ok"
    assert hosts.host_name(several=True).verdict == "failed"
    monkeypatch.setattr(hosts, "addresses", lambda name: [])
    assert "does not resolve" in hosts.host_name(several=True).found
    monkeypatch.setattr(hosts, "addresses", lambda name: ["127.0.1.1", "10.0.0.4"])
    assert hosts.host_name(several=True).verdict == "ok"
    monkeypatch.setattr(hosts, "addresses", lambda name: ["::1"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert hosts.host_name(several=True).verdict == "ok"
