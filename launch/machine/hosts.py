"""Checks of the connection of a launch's machines: names, port, hostfile, exported variables."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launch.machine.checks import Check, failed, ok, refused, unchecked, warning
from launch.ranks import processes
from recipes import files
from recipes.problems import Problem, counted, some

DEFAULT_PORT = 29500  # of deepspeed and torchrun
# Beginnings of variables that the deepspeed launcher of 0.19.8 hands to other machines (launcher/runner.py,
# cuda_accelerator.py), and of others that are read there. A run takes all further ones from rank 0.
EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
READ = ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "DS_", "TRITON_", "XDG_CACHE_HOME", "HF_TOKEN")
LOCAL = ("localhost", "127.")


@dataclass(frozen=True)
class Hosts:
    """A hostfile: every machine's slots (processes, one GPU each) by its name, and the file's problems."""

    slots: Mapping[str, int]
    problems: tuple[Problem, ...] = ()

    @property
    def total(self) -> int:
        """Slots of all machines."""
        return sum(self.slots.values())

    @property
    def here(self) -> int | None:
        """Slots of this machine; None: it is not named."""
        name = socket.gethostname()
        own = {name, name.partition(".")[0], "localhost", "127.0.0.1"}
        return next((slots for host, slots in self.slots.items() if host in own), None)


def read_hosts(path: str | Path) -> Hosts:
    """Read a hostfile as the deepspeed launcher does ("name slots=8", "#" for comments).

    Raises FileError if there is no such file, or no text in it.
    """
    file = files.path_of(path, "--hostfile")
    slots: dict[str, int] = {}
    problems = []
    for number, written in enumerate(files.read_text(file).splitlines(), 1):
        line, came, rule, fix = written.strip(), written.strip()[:60], "", ""
        if not line or line.startswith("#"):
            continue
        told = re.match(r"(\S+)\s+slots=(\d{1,4})(?!\d)", line)
        if told is None:
            rule, fix = "a line is a machine and its GPUs, as the launcher reads it", "write: name slots=8"
        elif told[1] in slots:
            came, rule = f"{told[1]} again", "each machine has one line"
            fix = f"leave one line for it, with slots={slots[told[1]] + int(told[2])} or as many as its GPUs"
        elif not int(told[2]):
            rule, fix = "no process fits", "remove the line"
        if rule or told is None:
            problems.append(Problem(str(file), came, rule, fix, where=f"{file}:{number}"))
        else:
            slots[told[1]] = int(told[2])
    if not slots and not problems:
        problems.append(Problem(str(file), "names no machine", "", "write: name slots=8", where=str(file)))
    return Hosts(slots, tuple(problems))


def several_machines(hosts: Hosts | None, environ: Mapping[str, str]) -> bool:
    """Check by hostfile or launcher's variables whether the launch has more than this machine."""
    if hosts is not None:
        return len(hosts.slots) > 1
    told = any(name in environ for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
    near = environ.get("MASTER_ADDR", "localhost").startswith(LOCAL)
    return told and not near and processes.local_world_size() < processes.world_size()


def host_name(several: bool) -> Check:
    """Check that other machines reach this one by its name: gloo connects to its address."""
    name = socket.gethostname()
    if not several:
        return ok(f"{name}; one machine needs no other to find it")
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return ok(f"{name}; gloo takes the address of {interface} (GLOO_SOCKET_IFNAME)")
    found = addresses(name)
    fix = "export GLOO_SOCKET_IFNAME=eth0, or what connects the machines, on each; or mend /etc/hosts"
    if not found:
        return failed(f"{name} does not resolve, and gloo connects to what it resolves to", fix)
    if all(address.startswith("127.") or address == "::1" for address in found):
        came = f"{name} resolves to {', '.join(found)}, where every machine reaches itself alone"
        return failed(came, fix)
    return ok(f"{name} is {', '.join(found)}")


def addresses(name: str) -> list[str]:
    """Return the addresses of a host name; [] if it does not resolve."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError):
        return []


def port(environ: Mapping[str, str]) -> Check:
    """Check that rank 0 can listen at the port where the processes meet."""
    number = environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or processes.rank():
        return unchecked(f"{number}: another process listens there, of this launch")
    if not processes.WHOLE.fullmatch(number) or not 1 <= int(number) <= 65535:
        return failed(f"MASTER_PORT={number!r}: a whole number from 1 to 65535", processes.UNSET)
    if taken := why_taken(int(number)):
        free = next((other for other in range(int(number) + 1, 65536) if not why_taken(other)), None)
        came = f"{number} cannot be listened at ({taken}): the processes of a launch meet there"
        return failed(came, f"give deepspeed or torchrun another: --master_port {free}")
    least, most = lent_ports()
    if least <= int(number) <= most:
        lent = f"of the {least} to {most} that outgoing connections may take at any time"
        return warning(
            f"{number} is free, and {lent}", f"one below {least}, e.g. --master_port {DEFAULT_PORT}"
        )
    return ok(f"{number} is free")


def why_taken(number: int) -> str | None:
    """Return the reason why nobody can listen at the port, or None."""
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", number))
    except OSError as error:
        return error.strerror or str(error)
    return None


def lent_ports() -> tuple[int, int]:
    """Return the least and greatest port that the system gives to outgoing connections."""
    try:
        least, most = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(least), int(most)
    except (OSError, ValueError):
        return 65536, 65536


def hostfile(hosts: Hosts, devices: int) -> list[Check]:
    """Check the hostfile's lines, and this machine's slots against its GPUs (`devices`, 0: none)."""
    found = refused(hosts.problems)
    if hosts.here is not None and devices and hosts.here > devices:
        came = f"slots={hosts.here} for this machine, which has {counted(devices, 'GPU')}"
        found.append(failed(came, f"write slots={devices}"))
    named = [host for host in hosts.slots if host.startswith(LOCAL)]
    if named and len(hosts.slots) > 1:
        came = f"{named[0]} among {len(hosts.slots)} machines: each takes it for itself"
        found.append(failed(came, "write its name in the network"))
    return found or [ok(f"{counted(len(hosts.slots), 'machine')}, {counted(hosts.total, 'slot')}")]


def reachable(hosts: Hosts) -> Check:
    """Check that the names resolve here, and that deepspeed can start processes there."""
    if len(hosts.slots) < 2:
        return ok("one machine")
    with ThreadPoolExecutor(32) as pool:
        found = dict(zip(hosts.slots, pool.map(addresses, hosts.slots), strict=True))
    if unknown := [host for host, there in found.items() if not there]:
        return failed(f"{some(unknown)} cannot be resolved from here", "mend the hostfile, DNS or /etc/hosts")
    if not shutil.which("pdsh"):
        others = "start each machine's own with deepspeed --no_ssh --node_rank N, or srun"
        came = "all resolve; there is no pdsh, by which deepspeed starts them"
        return warning(came, f"apt-get install pdsh; or {others}")
    return unchecked("all resolve; whether ssh lets you in, and what is there, is not seen from here")


def environment(hosts: Hosts, environ: Mapping[str, str]) -> Check:
    """Check for variables that the deepspeed launcher does not hand to the other machines."""
    if len(hosts.slots) < 2:
        return ok("one machine")
    written = set()
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    for file in (Path.home() / name, Path(name)):
        if file.is_file():
            written |= {line.partition("=")[0] for line in files.read_text(file).splitlines()}
    read = {name for name in environ if name.startswith(READ) and not name.startswith(EXPORTED)}
    if lost := sorted(read - written):
        came = f"deepspeed does not hand {some(lost)} to the other machines"
        return warning(came, f"write NAME=value lines into ~/{name}")
    return ok("all that matters is handed on")
