"""DeepSpeed's compiled ops: built once per environment, before training, and with a word about it.

DeepSpeed compiles an op at its first use with c++ and ninja and keeps it in torch's extension directory
($TORCH_EXTENSIONS_DIR, by default ~/.cache/torch_extensions/...). Left to itself it does so in silence, on every rank at
once, and a run killed while compiling leaves torch's lock file behind, on which every later run waits for ever.

Here one process per machine compiles while the others wait. It holds a lock of the kernel's, which dies with its holder.
Torch's own lock file may then be left by a dead process, or belong to another program on this machine that uses the same
directory; /proc tells the two apart.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory

from data.durable_files import locked, write_atomically
from ds_configs.known_keys import lookup
from launch.machine import ending

Say = Callable[[str], None]

BATON = "lock"  # torch's lock file (torch.utils.file_baton)
STAMP = ".megarecipes.json"
SETTLE_SECONDS = (
    3.0  # no living process loads a compiled op for longer, so an older baton that nobody holds is left over
)
UNSEEN_SECONDS = 600.0  # the same where the system cannot tell who holds it: no op compiles for longer
NOTICEABLE_SECONDS = 5.0  # looking at an op that is up to date takes 2
LAST_LINES, LINE_WIDTH = 15, 300

TORCH_ADAM = (
    'set "torch_adam": true in optimizer.params of the DeepSpeed JSON: torch\'s AdamW, same rule, slower'
)
NO_NVME = "offload to memory instead of NVMe: --ds_config zero3_offload"


class CompileError(RuntimeError):
    """An op cannot be compiled or loaded. The message has the compiler's last lines and the fix."""


@dataclass(frozen=True)
class Op:
    """An op of DeepSpeed's. `builder`: the name of its builder class; `way_round`: how to do without the op."""

    builder: str
    way_round: str


def needed(ds: dict[str, Any]) -> tuple[Op, ...]:
    """Ops that a run with the resolved DeepSpeed JSON `ds` uses, as DeepSpeed's engine chooses them."""
    optimizer, parameters = (
        lookup(ds, f"zero_optimization.offload_{kind}.device") for kind in ("optimizer", "param")
    )
    ops = []
    if lookup(ds, "optimizer.params.torch_adam") is not True:
        ops.append(Op("CPUAdamBuilder" if optimizer in ("cpu", "nvme") else "FusedAdamBuilder", TORCH_ADAM))
    if "nvme" in (optimizer, parameters):
        ops += [Op("PinMemoryBuilder", NO_NVME), Op("AsyncIOBuilder", NO_NVME)]
    return tuple(ops)


def prepare(ds: dict[str, Any], group: dist.ProcessGroup, say: Say = print) -> None:
    """Have every op of `ds` compiled on every machine of `group`, all ranks of the run. Collective.

    Ends the run with exit code 1 on every rank, and one explanation, where an op cannot be built.
    """
    ops = needed(ds)
    if not ops:
        return
    failure = None
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        try:
            for op in ops:
                build(op, say)
        except CompileError as e:
            failure = str(e)
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group=group)
    for text in failures:
        if text:
            ending.refuse(text, code=1)


def build(op: Op, say: Say = print) -> None:
    """Compile `op` unless that is done, and remove what a killed compilation left. Raises CompileError."""
    builder = get_accelerator().create_op_builder(op.builder)
    if builder is None or _installed(builder.name):
        return  # DeepSpeed itself says what it thinks of an accelerator without this op
    name = builder.name
    try:
        directory = Path(_get_build_directory(name, False))
        with locked(directory / ".megarecipes", f"DeepSpeed's {name}", say):
            remove_stale_baton(directory, name, say)
            library = directory / f"{name}.so"
            if library.exists() and _stamp(directory) == _facts(library):
                return
            with _announced(
                f"compiling DeepSpeed's {name}, once per environment (about 40 s) …", library.exists(), say
            ):
                builder.load(verbose=False)
            if library.exists():
                write_atomically(directory / STAMP, json.dumps(_facts(library)))
    except (
        Exception
    ) as e:  # torch, ninja, the compiler, the file system, the dynamic linker: each has its own
        raise CompileError(_explanation(name, e, op.way_round)) from e


def remove_stale_baton(directory: Path, name: str, say: Say) -> None:
    """Remove torch's lock file from an op's build directory if its owner is dead; wait for the owner if it lives."""
    baton, told = directory / BATON, False
    while (age := _age(baton)) is not None:
        users = working_in(directory)
        if users and not told:
            say(f"DeepSpeed's {name} is being compiled by process {users[0]}: waiting for it")
            told = True
        if users or age < (UNSEEN_SECONDS if users is None else SETTLE_SECONDS):
            if users is None and not told:
                say(
                    f"{baton}: another program is compiling, or was killed at it; delete the file if there is none (waiting)"
                )
                told = True
            time.sleep(0.5)
            continue
        baton.unlink(missing_ok=True)
        say(f"removed {baton}, which a process killed while compiling {name} left behind")


def working_in(directory: Path) -> list[int] | None:
    """Processes of this machine that hold the baton of `directory` open or compile in it; None: the system cannot tell.

    Torch keeps its lock file open as long as it holds it. ninja and the compiler, which outlive a killed parent, run in the
    directory itself.
    """
    processes = list(Path("/proc").glob("[0-9]*"))
    if not processes:
        return None
    place, baton = str(directory.resolve()), str((directory / BATON).resolve())
    found = []
    for process in processes:
        try:
            links = [*(process / "fd").iterdir()]
            if os.readlink(process / "cwd") == place or any(os.readlink(link) == baton for link in links):
                found.append(int(process.name))
        except OSError:
            continue  # it has ended, or is another user's, who has a directory of their own
    return sorted(found)


@contextmanager
def _announced(line: str, perhaps: bool, say: Say):
    """Say `line` before the body; with `perhaps`, only once the body has taken long enough to be a compilation."""
    timer = threading.Timer(NOTICEABLE_SECONDS if perhaps else 0.0, say, [line])
    if perhaps:
        timer.start()
    else:
        say(line)
    try:
        yield
    finally:
        timer.cancel()


def _installed(name: str) -> bool:
    """Whether DeepSpeed was installed with this op compiled beforehand (DS_BUILD_OPS=1)."""
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator()._name


def _facts(library: Path) -> dict[str, Any]:
    """What a library was built from and for; a change of any means that DeepSpeed will look at it again."""
    return {
        "deepspeed": [deepspeed.__version__, deepspeed.__file__],
        "torch": [torch.__version__, torch.__file__],
        "compiler": os.environ.get("CXX", "c++"),
        "written": library.stat().st_mtime_ns,
    }


def _stamp(directory: Path) -> Any:
    try:
        return json.loads((directory / STAMP).read_text())
    except (OSError, ValueError):
        return None


def _age(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None


def _explanation(name: str, error: Exception, way_round: str) -> str:
    # ninja repeats each command, a thousand characters wide, before the compiler's words.
    lines = [
        line for line in str(error).splitlines() if line.strip() and "-DTORCH_EXTENSION_NAME=" not in line
    ]
    told = (
        "\n".join(f"  | {line[:LINE_WIDTH]}" for line in lines[-LAST_LINES:]) or f"  | {type(error).__name__}"
    )
    where = (
        ", or TORCH_EXTENSIONS_DIR to a directory that can be written" if isinstance(error, OSError) else ""
    )
    return (
        f"DeepSpeed's {name} could not be compiled:\n{told}\n"
        f"it needs a C++ compiler, ninja and Python's headers (Debian and Ubuntu: apt-get install g++ ninja-build python3-dev). "
        f"Install what is missing{where}, or {way_round}"
    )
