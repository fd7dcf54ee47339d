"""The network interface by which gloo's groups of a run's ranks reach each other.

gloo listens at the address that this machine's own name resolves to, unless GLOO_SOCKET_IFNAME names an
interface (torch 2.13, ProcessGroupGloo.cpp). Where that is a loopback address, ranks on other machines
connect to themselves and wait for half an hour.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

from recipes.problems import Problem, ProblemsError, some

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's and deepspeed's
GLOO = "GLOO_SOCKET_IFNAME"
NCCL = "NCCL_SOCKET_IFNAME"


def follow_nccl() -> None:
    """Set gloo's interface to that of NCCL_SOCKET_IFNAME, unless gloo's own variable is set."""
    if GLOO not in os.environ and (
        chosen := gloo_interface(os.environ.get(NCCL, ""), interfaces_with_address())
    ):
        os.environ[GLOO] = chosen


def stay_on_loopback() -> None:
    """Let the groups of one machine listen only for that machine, unless the user names an interface."""
    if "lo" in interfaces_with_address():
        os.environ.setdefault(GLOO, "lo")
        os.environ.setdefault(NCCL, "lo")


def gloo_interface(nccl: str, interfaces: Sequence[str]) -> str | None:
    """Choose the one of `interfaces` named by NCCL_SOCKET_IFNAME=`nccl`; None if it leaves that open.

    gloo knows only exact names. Of those left over by "^" one is taken if it is the only one that is not the
    loopback.
    """
    chosen = nccl_interfaces(nccl, interfaces)
    if "^" in nccl[:2]:
        left = [name for name in chosen if name != "lo"]
        if len(left) == 1:
            return left[0]
        return None
    return next(iter(chosen), None)


def nccl_interfaces(nccl: str, interfaces: Sequence[str]) -> list[str]:
    """Return those of `interfaces` that NCCL_SOCKET_IFNAME=`nccl` names.

    It is a list of prefixes, of exact names after "=", and of what is left out after "^" (NCCL 2.29,
    documentation of environment variables).
    """
    sign = next((each for each in ("^=", "=^", "^", "=") if nccl.startswith(each)), "")
    listed = tuple(name for name in nccl[len(sign) :].split(",") if name)
    chosen = []
    for interface in interfaces:
        meant = interface in listed
        if "=" not in sign:
            meant = interface.startswith(listed)
        if meant != ("^" in sign):
            chosen.append(interface)
    return chosen


def check_named(environ: Mapping[str, str]) -> None:
    """Check that the variables of gloo and NCCL name interfaces of this machine. Raises ProblemsError."""
    there = [name for _, name in socket.if_nameindex()]
    gloo = environ.get(GLOO, "")
    nccl = environ.get(NCCL, "")
    problems = []
    missing = [name for name in gloo.split(",") if gloo and name not in there]
    if missing:
        problems.append(_no_interface(GLOO, gloo, some(missing), there))
    if nccl and not nccl_interfaces(nccl, there):
        problems.append(_no_interface(NCCL, nccl, "that it means", there))
    if problems:
        raise ProblemsError(problems)


def _no_interface(
    variable: str, value: str, missing: str, there: Sequence[str]
) -> Problem:
    return Problem(
        variable,
        f"{variable}={value} on {socket.gethostname()}, which has no interface {missing}",
        f"it has {some(there)}",
        "name the one that the machines share, or unset it",
    )


def interfaces_with_address() -> list[str]:
    """List the interfaces with an address by which other machines can be reached, IPv4 or IPv6.

    An address of IPv6 that counts only on its link, of which each interface has one, is none.
    """
    import psutil

    names = []
    for name, addresses in psutil.net_if_addrs().items():
        for family, address, *_ in addresses:
            six = family == socket.AF_INET6 and not address.startswith("fe80:")
            if family == socket.AF_INET or six:
                names.append(name)
                break
    return names


def check_own_address(environ: Mapping[str, str]) -> None:
    """Check that other machines can reach this one by its own name. Raises ProblemsError."""
    name = socket.gethostname()
    if GLOO not in environ and is_loopback(name):
        rule = (
            "ranks on other machines would connect to themselves (gloo listens there)"
        )
        raise ProblemsError.of(
            GLOO,
            f"{name}, this machine's own name, resolves to {resolved(name) or 'nothing'}",
            rule,
            f"set {GLOO} to the interface that the machines share, e.g. eth0, or correct /etc/hosts",
        )


def is_loopback(host: str) -> bool:
    """Check whether a name resolves to a loopback address or, which is the same for gloo, not at all."""
    address = resolved(host)
    return address is None or ipaddress.ip_address(address).is_loopback


def resolved(host: str) -> str | None:
    """Return the first address of a name; None if it does not resolve."""
    with contextlib.suppress(OSError, UnicodeError):
        return str(
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        ).partition("%")[0]
    return None
