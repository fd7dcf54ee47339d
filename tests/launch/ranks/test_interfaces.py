"""The interface by which gloo reaches other machines."""

import socket

import pytest

from launch.ranks import interfaces, processes
from launch.ranks.interfaces import check_own_address, gloo_interface
from recipes.problems import ProblemsError

INTERFACES = ["lo", "docker0", "eno1", "eth0", "eth1", "ib0"]
MEANT = {
    "": None,
    "eth": "eth0",
    "ib,eth": "eth0",  # in the order of the machine, as NCCL goes through them
    "=eth1": "eth1",
    "=eth": None,
    "=ib1,ib0": "ib0",
    "wlan": None,
    "^lo,docker": None,  # four are left
    "^docker,eno,eth": "ib0",
    "^=docker0,eno1,eth0,eth1": "ib0",
    "^=docker0,eno1,eth": None,
}


@pytest.mark.parametrize("nccl", MEANT)
def test_gloo_takes_the_interface_that_nccl_is_told(nccl):
    assert gloo_interface(nccl, INTERFACES) == MEANT[nccl]


def test_only_what_nobody_chose_is_set(monkeypatch):
    monkeypatch.setattr(interfaces, "interfaces_with_address", lambda: INTERFACES)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    interfaces.follow_nccl()
    assert interfaces.os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    interfaces.follow_nccl()
    assert interfaces.os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("GLOO_SOCKET_IFNAME", "eth9", "no interface eth9: it has lo, docker0, eno1"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth9", "no interface eth9"),
        ("GLOO_SOCKET_IFNAME", "eth", "no interface eth:"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", None),
        ("NCCL_SOCKET_IFNAME", "wlan", "no interface that it means"),
        ("NCCL_SOCKET_IFNAME", "=eth", "no interface that it means"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker,e,ib", "no interface that it means"),
        ("NCCL_SOCKET_IFNAME", "wlan,eth", None),
        ("NCCL_SOCKET_IFNAME", "^wlan", None),
        ("NCCL_SOCKET_IFNAME", "", None),
    ],
)
def test_an_interface_that_is_not_there_is_refused_with_those_there_are(variable, value, said, monkeypatch):
    monkeypatch.setattr(interfaces.socket, "if_nameindex", lambda: [*enumerate(INTERFACES, 1)])
    if said is None:
        interfaces.check_named({variable: value})
        return
    with pytest.raises(ProblemsError) as caught:
        interfaces.check_named({variable: value})
    assert said in str(caught.value) and str(caught.value).startswith(f"{variable}={value} on ")


def test_the_loopback_of_this_machine_has_an_address():
    assert "lo" in interfaces.interfaces_with_address()


def test_an_address_of_ipv6_is_one_unless_it_is_of_its_link_alone(monkeypatch):
    """Every interface that is up has one of those, also one that is part of another."""
    addresses = {"lo": ["::1"], "eth0": ["fe80::1%eth0"], "eth1": ["fd00::1", "fe80::2%eth1"], "ib0": []}
    families = {name: [(socket.AF_INET6, each, None) for each in of] for name, of in addresses.items()}
    for name, of in families.items():
        of.append((socket.AF_PACKET, "02:fc:00:00:00:01", name))
    monkeypatch.setattr("psutil.net_if_addrs", lambda: families)
    assert interfaces.interfaces_with_address() == ["lo", "eth1"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "forgotten after the test")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    interfaces.follow_nccl()
    assert interfaces.os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


def test_a_machine_whose_name_is_its_loopback_is_refused(monkeypatch):
    """As Debian writes /etc/hosts, or where the name does not resolve."""
    addresses = {"here": "127.0.1.1", "six": "::1", "lost": None, "well": "10.0.0.2"}
    monkeypatch.setattr(interfaces, "resolved", addresses.get)
    for name in ("here", "six", "lost"):
        monkeypatch.setattr(interfaces.socket, "gethostname", lambda name=name: name)
        with pytest.raises(ProblemsError, match="set GLOO_SOCKET_IFNAME to the interface"):
            check_own_address({})
        check_own_address({"GLOO_SOCKET_IFNAME": "eth0"})
    monkeypatch.setattr(interfaces.socket, "gethostname", lambda: "well")
    check_own_address({})


@pytest.mark.parametrize(
    ("here", "master", "several"),
    [("2", "10.0.0.4", True), ("4", "10.0.0.4", False), ("2", "127.0.0.1", False), ("2", None, False)],
)
def test_which_launch_is_on_several_machines(monkeypatch, here, master, several):
    environ = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": master or ""}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if master is None:
        monkeypatch.delenv("MASTER_ADDR")
    assert processes.several_machines() is several, "all on this one, where they meet at the loopback"
