"""The hostfile of a launch, and checks of its machines: their names, GPUs and exported variables."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from launch.machine.checks import Check, failed, ok, refused, unchecked, warning
from launch.ranks.interfaces import resolved
from recipes import files
from recipes.problems import Problem, counted, some

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
    file, fix = files.path_of(path, "--hostfile"), "write: name slots=8"
    slots: dict[str, int] = {}
    problems = []
    for number, line in enumerate(map(str.strip, files.read_text(file).splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        told = re.match(r"(\S+)\s+slots=([1-9]\d{0,3})(?!\d)", line)
        if told and told[1] not in slots:
            slots[told[1]] = int(told[2])
            continue
        rule = "a line is a machine and its GPUs, as the launcher reads it"
        rule = "each machine has one line" if told else rule
        problems.append(Problem(str(file), line[:60], rule, fix, where=f"{file}:{number}"))
    if not slots and not problems:
        problems.append(Problem(str(file), "names no machine", "", fix, where=str(file)))
    return Hosts(slots, tuple(problems))


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
    with ThreadPoolExecutor(32) as pool:
        found = dict(zip(hosts.slots, pool.map(resolved, hosts.slots), strict=True))
    if unknown := [host for host, address in found.items() if not address]:
        return failed(f"{some(unknown)} cannot be resolved from here", "mend the hostfile, DNS or /etc/hosts")
    if not shutil.which("pdsh"):
        others = "start each machine's own with deepspeed --no_ssh --node_rank N, or srun"
        came = "all resolve; there is no pdsh, by which deepspeed starts them"
        return warning(came, f"apt-get install pdsh; or {others}")
    return unchecked("all resolve; whether ssh lets you in, and what is there, is not seen from here")


def environment(environ: Mapping[str, str]) -> Check:
    """Check for variables that the deepspeed launcher does not hand to the other machines."""
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
