"""Checks of a launch: who starts the processes, on which machines, and what the plan asks of those."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ds_configs.plan import Plan
from launch.machine import checkup
from launch.machine.checks import Check, Function
from launch.machine.memory import Memory
from launch.planning import memory_fit
from launch.planning.prediction.forecast import SNUG
from launch.ranks import processes
from recipes import files
from recipes.plural import counted
from recipes.problems import Problem, some

DEFAULT_PORT = 29500  # of deepspeed and torchrun
# What the deepspeed launcher of 0.19.8 hands to other machines (launcher/runner.py, cuda_accelerator.py), and
# beginnings of what is read there all the same. The rest a run takes from rank 0 by itself.
EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
READ = ("OMP_NUM_THREADS", "LD_LIBRARY_PATH", "DS_", "TRITON_", "XDG_CACHE_HOME", "HF_TOKEN")
LOCAL = ("localhost", "127.")


@dataclass(frozen=True)
class Hosts:
    """A hostfile: slots (processes, one GPU each) of every machine by its name; what is wrong with it."""

    slots: Mapping[str, int]
    problems: tuple[Problem, ...] = ()

    @property
    def total(self) -> int:
        """Slots of all machines."""
        return sum(self.slots.values())

    @property
    def here(self) -> int | None:
        """Slots of this machine; None where it is not named."""
        name = socket.gethostname()
        own = {name, name.partition(".")[0], "localhost", "127.0.0.1"}
        return next((slots for host, slots in self.slots.items() if host in own), None)


def read_hosts(path: str | Path) -> Hosts:
    """The hostfile as the deepspeed launcher reads it ("name slots=8", "#" for comments).

    Raises FileError: no such file, or no text.
    """
    file = files.path_of(path, "--hostfile")
    slots: dict[str, int] = {}
    problems = []
    for number, written in enumerate(files.read_text(file).splitlines(), 1):
        line, place = written.strip(), f"{file}:{number}"
        if not line or line.startswith("#"):
            continue
        told = re.match(r"(\S+)\s+slots=(\d{1,4})(?!\d)", line)
        if told is None:
            rule = "a line is a machine and its GPUs, as the launcher reads it"
            problems.append(Problem(str(file), line[:60], rule, "write: name slots=8", where=place))
        elif told[1] in slots:
            fix = f"leave one line for it, with slots={slots[told[1]] + int(told[2])} or as many as its GPUs"
            problems.append(
                Problem(str(file), f"{told[1]} again", "each machine has one line", fix, where=place)
            )
        elif not int(told[2]):
            problems.append(Problem(str(file), line[:60], "no process fits", "remove the line", where=place))
        else:
            slots[told[1]] = int(told[2])
    if not slots and not problems:
        problems.append(Problem(str(file), "names no machine", "", "write: name slots=8", where=str(file)))
    return Hosts(slots, tuple(problems))


def port(environ: Mapping[str, str] = os.environ) -> Check:
    """Whether rank 0 can listen where the processes meet."""
    key, number = "port", environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or processes.rank():
        return Check(key, "not checked", f"{number}: another process listens there, of this launch")
    if not processes.WHOLE.fullmatch(number) or not 1 <= int(number) <= 65535:
        return Check(
            key, "failed", f"MASTER_PORT={number!r}: a whole number from 1 to 65535", processes.UNSET
        )
    taken = why_taken(int(number))
    if taken:
        free = next((other for other in range(int(number) + 1, 65536) if not why_taken(other)), None)
        came = f"{number} cannot be listened at ({taken}): the processes of a launch meet there"
        return Check(key, "failed", came, f"give deepspeed or torchrun another: --master_port {free}")
    least, most = lent_ports()
    if least <= int(number) <= most:
        came = (
            f"{number} is free, and of the {least} to {most} that outgoing connections may take at any time"
        )
        return Check(key, "warning", came, f"one below {least}, e.g. --master_port {DEFAULT_PORT}")
    return Check(key, "ok", f"{number} is free")


def why_taken(number: int) -> str | None:
    """Why nobody can listen at that port; None: one can."""
    try:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("", number))
    except OSError as error:
        return error.strerror or str(error)
    return None


def lent_ports() -> tuple[int, int]:
    """Least and greatest port that the system gives to outgoing connections."""
    try:
        least, most = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(least), int(most)
    except (OSError, ValueError):
        return 65536, 65536


def several_machines(hosts: Hosts | None = None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launch, by its hostfile or by its launcher's variables, is on more than this machine."""
    if hosts is not None:
        return len(hosts.slots) > 1
    told = any(name in environ for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"))
    near = environ.get("MASTER_ADDR", "localhost").startswith(LOCAL)
    return told and not near and processes.local_world_size() < processes.world_size()


def of_hosts(hosts: Hosts, devices: int, environ: Mapping[str, str]) -> dict[str, Function]:
    """The checks of a hostfile by their keys. `devices`: GPUs of this machine, 0 without any."""
    return {
        "hostfile": partial(hostfile, hosts, devices),
        "hosts": partial(reachable, hosts),
        "environment": partial(environment, hosts, environ),
    }


def hostfile(hosts: Hosts, devices: int) -> list[Check]:
    """Its lines; and this machine's against the GPUs that it has."""
    found = [
        Check("hostfile", "failed", str(Problem(p.key, p.came, p.rule, where=p.where)), str(p.fix))
        for p in hosts.problems
    ]
    if hosts.here is not None and devices and hosts.here > devices:
        came = f"slots={hosts.here} for this machine, which has {counted(devices, 'GPU')}"
        found.append(Check("hostfile", "failed", came, f"write slots={devices}"))
    named = [host for host in hosts.slots if host.startswith(LOCAL)]
    if named and len(hosts.slots) > 1:
        came = f"{named[0]} among {len(hosts.slots)} machines: each takes it for itself"
        found.append(Check("hostfile", "failed", came, "write its name in the network"))
    said = f"{counted(len(hosts.slots), 'machine')}, {counted(hosts.total, 'slot')}"
    return found or [Check("hostfile", "ok", said)]


def reachable(hosts: Hosts) -> Check:
    """Whether the names resolve here, and deepspeed can start processes there."""
    if len(hosts.slots) < 2:
        return Check("hosts", "ok", "one machine")
    with ThreadPoolExecutor(32) as pool:
        found = dict(zip(hosts.slots, pool.map(checkup.addresses, hosts.slots), strict=True))
    if unknown := [host for host, there in found.items() if not there]:
        came = f"{some(unknown)} cannot be resolved from here"
        return Check("hosts", "failed", came, "mend the hostfile, DNS or /etc/hosts")
    if not shutil.which("pdsh"):
        fix = (
            "apt-get install pdsh; or start each machine's own with deepspeed --no_ssh --node_rank N, or srun"
        )
        return Check("hosts", "warning", "all resolve; there is no pdsh, by which deepspeed starts them", fix)
    return Check(
        "hosts",
        "not checked",
        "all resolve; whether ssh lets you in, and what is there, is not seen from here",
    )


def environment(hosts: Hosts, environ: Mapping[str, str] = os.environ) -> Check:
    """Variables that are set here, and that the deepspeed launcher does not hand to the other machines."""
    key = "environment"
    if len(hosts.slots) < 2:
        return Check(key, "ok", "one machine")
    written = set()
    name = environ.get("DS_ENV_FILE", ".deepspeed_env")
    for file in (Path.home() / name, Path(name)):
        if file.is_file():
            written |= {line.partition("=")[0] for line in files.read_text(file).splitlines()}
    lost = sorted(
        v for v in environ if v.startswith(READ) and not v.startswith(EXPORTED) and v not in written
    )
    if not lost:
        return Check(key, "ok", "all that matters is handed on")
    came = f"deepspeed does not hand {some(lost)} to the other machines"
    return Check(key, "warning", came, f"write NAME=value lines into ~/{name}")


def of_plan(plan: Plan, memory: Memory, hosts: Hosts | None) -> dict[str, Function]:
    """The checks of a resolved plan by their keys."""
    return {"layout": partial(layout, plan, memory, hosts), "memory": partial(fits, plan, memory, hosts)}


def layout(plan: Plan, memory: Memory, hosts: Hosts | None) -> list[Check]:
    """Degrees and batch; whether there are as many GPUs, and tensor ranks on one machine."""
    shape, world = plan.layout, plan.layout.world
    degrees = f"tp {shape.tp} x pp {shape.pp} x dp {shape.dp} = {counted(world, 'process')}"
    found = [Check("batch", "ok", shape.identity())]
    if hosts is None and not processes.launched() and memory.gpus and world > memory.gpus:
        came = f"{degrees}, each with a GPU of its own; this machine has {memory.gpus}"
        fix = "name the machines with --hostfile, or make it smaller (--set parallel.dp=, parallel.tp=, …)"
        return [Check("layout", "failed", came, fix), *found]
    if hosts is not None and hosts.slots and world > hosts.total:
        came = f"{degrees}, and the hostfile has {counted(hosts.total, 'slot')}: one for each"
        fix = "name more machines there, or make it smaller (--set parallel.dp=, parallel.tp=, …)"
        return [Check("layout", "failed", came, fix), *found]
    slots = set(hosts.slots.values()) if hosts else set()
    if slots and shape.tp > 1 and any(count % shape.tp for count in slots):
        came = f"{degrees}: tensor parallelism crosses machines of {min(slots)} slots, over a slower network"
        fix = f"--set parallel.tp= a divisor of {min(slots)}, and more pipeline stages"
        return [Check("layout", "warning", came, fix), *found]
    return [Check("layout", "ok", degrees), *found]


def ranks_here(plan: Plan, memory: Memory, hosts: Hosts | None) -> int:
    """Processes of the plan on this machine."""
    world = plan.layout.world
    if processes.launched():
        return min(world, processes.local_world_size())
    if hosts is not None and hosts.slots:
        return min(world, hosts.here or max(hosts.slots.values()))
    return min(world, memory.gpus or world)


def fits(plan: Plan, memory: Memory, hosts: Hosts | None) -> Check:
    """The planner's memory of this machine's processes against what it has."""
    ranks = ranks_here(plan, memory, hosts)
    rank = memory_fit.needs(plan, gpus=memory.gpus > 0)
    host = rank.host * ranks if memory.gpus else (rank.total + rank.host) * ranks
    rooms = [(host, memory.host_bytes, "of the host")]
    if memory.gpus:
        rooms.insert(0, (rank.total, memory.gpu_bytes, "of a GPU"))
    said = [f"{needed / 1e9:.3g} of {room / 1e9:.3g} GB {place}" for needed, room, place in rooms if needed]
    came, share = f"takes {', '.join(said)}, as predicted", max(needed / room for needed, room, _ in rooms)
    fix = (
        "shard or offload more (--ds_config zero3, zero3_offload), or more processes; launch/plan.py says how"
    )
    if share > 1:
        return Check("memory", "failed", came, fix)
    return (
        Check("memory", "warning", f"{came}: snug", fix) if share > 1 - SNUG else Check("memory", "ok", came)
    )


def unread(sections: Sequence[str], untried: str | None) -> Check:
    """What of the DeepSpeed JSON nothing here checks; `untried`: keys that no test has run with."""
    said = []
    if sections:
        said.append(f"{', '.join(sections)}: handed to DeepSpeed as written")
    if untried:
        said.append(untried)
    return (
        Check("rest of the JSON", "not checked", "; ".join(said))
        if said
        else Check("rest of the JSON", "ok", "every key is checked")
    )
