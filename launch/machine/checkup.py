"""Checks of this machine that no recipe is needed for: packages, accelerator, compilers, limits.

Each function answers with one `Check`; what it asks the system stands in functions of its own (`installed`,
`file_limit`, `addresses`), so that tests can put another machine in their place.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
import resource
import shutil
import socket
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ds_configs.plan import Machine
from launch.machine import abilities, gpu_checkup
from launch.machine.checks import Check, Function
from recipes.problems import some

ROOT = Path(__file__).resolve().parents[2]
# Packages of requirements.txt that no run needs: tests, lint and types.
TOOLS = re.compile(r"pytest|hypothesis|ruff|mypy|types-")
# Variables of this project, and what each is for.
VARIABLES = {
    "MEGARECIPES_CACHE": "directory of vocabularies, tokens and compiled ops",
    "MEGARECIPES_NVME": "directory for NVMe offload",
    "MEGARECIPES_VERBOSE": "1: what the libraries say, too",
    "MEGARECIPES_LOCAL_RANK": "a run's own",
}
FILES, FILES_PER_RANK = 128, 8  # that a process may need open: libraries and data; connections


def functions(machine: Machine, ranks: int, world: int, several: bool) -> dict[str, Function]:
    """The checks by their keys. `ranks`: processes on this machine, of `world`; `several`: machines."""
    return {
        "python": python,
        "packages": packages,
        "accelerator": gpu_checkup.accelerator,
        "GPU kernels": gpu_checkup.kernels,
        "precision": partial(gpu_checkup.precision, machine),
        "compiler": compiler,
        "CUDA compiler": gpu_checkup.cuda_compiler,
        "libaio": partial(libaio, machine),
        "shared memory": partial(gpu_checkup.shared_memory, ranks),
        "open files": partial(open_files, world),
        "variables": variables,
        "host name": partial(host_name, several),
    }


def python() -> Check:
    """The interpreter against pyproject's requires-python."""
    from packaging.specifiers import SpecifierSet

    version, file = platform.python_version(), ROOT / "pyproject.toml"
    written = re.search(r'^requires-python = "(.+)"', file.read_text(), re.M) if file.exists() else None
    if written is None:
        return Check("python", "not checked", f"{version}; there is no {file} that says which are fit")
    if version in SpecifierSet(written[1]):
        return Check("python", "ok", version)
    fix = "make a virtual environment with a fit one: make setup PYTHON=python3.11"
    return Check("python", "failed", f"{version}, and {written[1]} is needed", fix)


def packages() -> Check:
    """The installed packages against the pins of requirements.txt; local versions (+cu126) are as good."""
    from packaging.requirements import Requirement

    file = ROOT / "requirements.txt"
    if not file.exists():
        return Check("packages", "not checked", f"there is no {file}")
    pinned = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    wanted = [Requirement(line) for line in pinned if line and not line.startswith("-")]
    wanted = [each for each in wanted if each.marker is None or each.marker.evaluate()]
    missing, other = [], []
    for each in wanted:
        found = installed(each.name)
        if found is None:
            missing.append(each.name)
        elif found not in each.specifier and not TOOLS.match(each.name):
            other.append(f"{each.name} {found}, pinned {str(each.specifier).removeprefix('==')}")
    fix = "pip install -r requirements.txt"
    if needed := [name for name in missing if not TOOLS.match(name)]:
        return Check("packages", "failed", f"not installed: {some(needed)}", fix)
    if other:
        came = f"{some(other)}: what was tested are the pinned ones"
        return Check("packages", "warning", came, fix)
    left_out = f"; not installed, for tests alone: {some(missing)}" if missing else ""
    return Check("packages", "ok", f"{len(wanted) - len(missing)} as pinned in requirements.txt{left_out}")


def installed(name: str) -> str | None:
    """Version of a package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def compiler() -> Check:
    """What DeepSpeed's ops are compiled with."""
    missing = abilities.missing_for_compiling()
    if not missing:
        return Check(
            "compiler", "ok", f"{shutil.which(os.environ.get('CXX', 'c++'))}, ninja, Python's headers"
        )
    fix = "apt-get install g++ ninja-build python3-dev (Debian, Ubuntu)"
    came = (
        f"no {', no '.join(missing)}: torch's optimizer takes the place of DeepSpeed's compiled one, slower"
    )
    return Check("compiler", "warning", came, fix)


def ops(ds: dict[str, Any]) -> Check:
    """DeepSpeed's ops that a run with the resolved JSON `ds` uses: there, or compiled at its first start."""
    from launch.machine import compiled_ops

    if not (needed := compiled_ops.needed(ds)):
        return Check("ops", "ok", "none is used: torch's operations step")
    directory = compiled_ops.use_own_directory()
    told = [
        f"{op.builder.removesuffix('Builder')} "
        + ("is built" if compiled_ops.is_built(op) else "is compiled at the first start (about 40 s)")
        for op in needed
    ]
    if not os.access(directory, os.W_OK):
        came = f"{directory} is not writable: {'; '.join(told)}"
        return Check(
            "ops", "failed", came, "set TORCH_EXTENSIONS_DIR or MEGARECIPES_CACHE to a writable directory"
        )
    return Check("ops", "ok", "; ".join(told))


def libaio(machine: Machine) -> Check:
    """What NVMe offload is built on; a configuration that needs it is refused without."""
    if machine.libaio:
        return Check("libaio", "ok", "there, for NVMe offload")
    return Check("libaio", "ok", "missing, which only NVMe offload needs (apt-get install libaio-dev)")


def files_needed(world: int) -> int:
    """Files that a process of `world` may need open at once."""
    return FILES + FILES_PER_RANK * world


def open_files(world: int) -> Check:
    """The hard limit, up to which a run raises the soft one by itself."""
    needed, limit = files_needed(world), file_limit()
    if limit == resource.RLIM_INFINITY or limit >= needed:
        allowed = "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"
        return Check("open files", "ok", f"{allowed} allowed, {needed:,} needed")
    came = f"a process may have {limit:,} files open, and {needed:,} are needed"
    return Check("open files", "failed", came, f"raise the hard limit: ulimit -Hn {needed}")


def file_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def variables() -> Check:
    """MEGARECIPES_*: misspelt ones, and values that mean nothing."""
    given = {name: value for name, value in os.environ.items() if name.startswith("MEGARECIPES_")}
    said, fixes = [], []
    for name in sorted(given.keys() - VARIABLES):
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        said.append(f"{name} is read nowhere")
        fixes.append(f"did you mean {near[0]}?" if near else f"there is: {', '.join(sorted(VARIABLES))}")
    if given.get("MEGARECIPES_VERBOSE", "1") not in ("0", "1", ""):
        said.append(f"MEGARECIPES_VERBOSE={given['MEGARECIPES_VERBOSE']} does nothing")
        fixes.append("1 turns it on")
    if said:
        return Check("variables", "warning", "; ".join(said), "; ".join(dict.fromkeys(fixes)))
    return Check(
        "variables",
        "ok",
        ", ".join(f"{name}={given[name]}" for name in sorted(given)) or "no MEGARECIPES_* is set",
    )


def host_name(several: bool) -> Check:
    """Whether other machines can reach this one by its name: gloo connects to what it resolves to."""
    name, key = socket.gethostname(), "host name"
    if not several:
        return Check(key, "ok", f"{name}; one machine needs no other to find it")
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return Check(key, "ok", f"{name}; gloo takes the address of {interface} (GLOO_SOCKET_IFNAME)")
    found = addresses(name)
    fix = "export GLOO_SOCKET_IFNAME=eth0, or what connects the machines, on each; or mend /etc/hosts"
    if not found:
        return Check(key, "failed", f"{name} does not resolve, and gloo connects to what it resolves to", fix)
    if all(address.startswith("127.") or address == "::1" for address in found):
        came = f"{name} resolves to {', '.join(found)}, where every machine reaches itself alone"
        return Check(key, "failed", came, fix)
    return Check(key, "ok", f"{name} is {', '.join(found)}")


def addresses(name: str) -> list[str]:
    """What a host name resolves to; nothing where it does not."""
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError):
        return []
