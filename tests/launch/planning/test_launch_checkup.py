"""Checks of a launch: launcher variables, port, hostfile, what the plan asks of the machines."""

import socket

import pytest

from launch.machine import checks
from launch.machine.memory import Memory
from launch.planning import launch_checkup, memory_fit
from launch.ranks import processes
from recipes import catalog
from recipes.files import FileError

LAPTOP = Memory(0, 0.0, 16e9)
EIGHT_V100 = Memory(8, 32e9, 1e12)


@pytest.fixture(autouse=True)
def nobody_launched_the_tests(monkeypatch):
    for name in (*processes.VARIABLES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def plan(name="default/sotu", *settings):
    return memory_fit.published_plan(catalog.load(name, settings))


def test_a_taken_port_names_a_free_one():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        number = other.getsockname()[1]
        found = launch_checkup.port({"MASTER_PORT": str(number)})
        assert found.verdict == "failed" and "--master_port" in found.fix and str(number) in found.found
        agent = {"MASTER_PORT": str(number), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert launch_checkup.port(agent).verdict == "not checked"
    assert launch_checkup.port({"MASTER_PORT": "99999"}).verdict == "failed"


def test_a_port_that_outgoing_connections_may_take(monkeypatch):
    monkeypatch.setattr(launch_checkup, "why_taken", lambda number: None)
    monkeypatch.setattr(launch_checkup, "lent_ports", lambda: (32768, 60999))
    assert launch_checkup.port({"MASTER_PORT": "40000"}).verdict == "warning"
    assert launch_checkup.port({}).verdict == "ok"


def hosts(tmp_path, *lines):
    (tmp_path / "hosts").write_text("\n".join(lines))
    return launch_checkup.read_hosts(tmp_path / "hosts")


def test_a_hostfile_is_read_as_the_launcher_reads_it(tmp_path):
    from deepspeed.launcher.runner import _parse_hostfile

    lines = ["# ours", "", "  node1 slots=4", "node2\tslots=2 # old"]
    found = hosts(tmp_path, *lines)
    assert found.slots == _parse_hostfile(lines) == {"node1": 4, "node2": 2} and found.total == 6
    assert not found.problems
    for wrong in ("node3", "node3 slots=x", "node3 slots = 4", "node1 slots=4", "#only"):
        with pytest.raises(ValueError, match="[Hh]ostfile"):
            _parse_hostfile([wrong] if wrong[0] == "#" else ["node1 slots=4", wrong])
        bad = hosts(tmp_path, wrong) if wrong[0] == "#" else hosts(tmp_path, "node1 slots=4", wrong)
        assert len(bad.problems) == 1, wrong
    assert hosts(tmp_path, "node1 slots=99999").problems, "no machine has so many GPUs"
    with pytest.raises(FileError, match="no such file"):
        launch_checkup.read_hosts(tmp_path / "none")


def test_all_of_a_hostfile_is_judged_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(
        launch_checkup.checkup, "addresses", lambda name: [] if name == "gone" else ["10.0.0.4"]
    )
    good = hosts(tmp_path, "node1 slots=8", "node2 slots=8")
    monkeypatch.setattr(launch_checkup.shutil, "which", lambda program: f"/usr/bin/{program}")
    found = checks.run(launch_checkup.of_hosts(good, 0, {}))
    assert [check.verdict for check in found] == ["ok", "not checked", "ok"]
    assert found[0].found == "2 machines, 16 slots"
    own = socket.gethostname()
    bad = hosts(tmp_path, f"{own} slots=8", "gone slots=8", "127.0.0.1 slots=8", "x", f"{own} slots=1")
    found = launch_checkup.hostfile(bad, devices=4)
    said = "\n".join(check.found for check in found)
    assert len(found) == 4 and {check.verdict for check in found} == {"failed"}
    for piece in ("hosts:4: x", "hosts:5", "slots=8 for this machine, which has 4 GPUs", "127.0.0.1 among"):
        assert piece in said
    assert launch_checkup.reachable(bad).found.startswith("gone cannot be resolved")
    monkeypatch.setattr(launch_checkup.shutil, "which", lambda program: None)
    assert "pdsh" in launch_checkup.reachable(good).fix


def test_variables_that_other_machines_do_not_get(tmp_path, monkeypatch):
    there, environ = (
        hosts(tmp_path, "a slots=1", "b slots=1"),
        {"NCCL_DEBUG": "INFO", "HOME": "/", "DS_ACCELERATOR": "cpu"},
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = launch_checkup.environment(there, environ)
    assert found.verdict == "warning" and "hand DS_ACCELERATOR to" in found.found
    (tmp_path / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\n")
    assert launch_checkup.environment(there, environ).verdict == "ok"


def test_which_launch_is_on_several_machines(tmp_path, monkeypatch):
    assert launch_checkup.several_machines(hosts(tmp_path, "a slots=1", "b slots=1"))
    assert not launch_checkup.several_machines(hosts(tmp_path, "a slots=8"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    several = launch_checkup.several_machines
    assert several(None, {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.4"})
    assert not several(None, {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}), "all on this one"
    assert not several(None, {"MASTER_ADDR": "10.0.0.4"}), "nothing says how many are here"


def test_a_layout_that_the_machines_do_not_carry(tmp_path):
    wide = plan("megatron_paper_table1/8.3b-mp-dp")  # tp 8 x dp 64
    (found, batch) = launch_checkup.layout(wide, EIGHT_V100, None)
    assert found.verdict == "failed" and "this machine has 8" in found.found and batch.verdict == "ok"
    fours = launch_checkup.layout(wide, EIGHT_V100, hosts(tmp_path, *(f"n{i} slots=4" for i in range(128))))
    assert fours[0].verdict == "warning" and "crosses machines of 4 slots" in fours[0].found
    eights = launch_checkup.layout(wide, EIGHT_V100, hosts(tmp_path, *(f"n{i} slots=8" for i in range(64))))
    assert eights[0].verdict == "ok"


def test_the_memory_is_that_of_this_machines_processes(tmp_path):
    large = plan("dgx2_gpt2_torch_ddp/72x3072-h8-tp8")  # 16 processes, 18 bytes of each of 8.3B/8 parameters
    assert launch_checkup.fits(large, EIGHT_V100, None).verdict == "ok"
    assert launch_checkup.fits(large, Memory(8, 16e9, 1e12), None).verdict == "failed"
    assert launch_checkup.fits(large, Memory(0, 0, 600e9), None).verdict == "ok"
    assert launch_checkup.fits(large, LAPTOP, None).verdict == "failed"
    one = hosts(tmp_path, *(f"n{i} slots=1" for i in range(16)))
    assert launch_checkup.fits(large, Memory(0, 0, 30e9), one).verdict == "ok", "one process a machine"
    offloaded = plan("default/sotu", "ds_config=zero2_offload", "parallel.dp=8")
    host = 8 * memory_fit.needs(offloaded).host
    for room, verdict in ((1.2 * host, "ok"), (1.01 * host, "warning"), (0.99 * host, "failed")):
        assert launch_checkup.fits(offloaded, Memory(8, 32e9, room), None).verdict == verdict
        assert launch_checkup.fits(offloaded, Memory(0, 0, room), None).verdict == "failed", "all of it"
