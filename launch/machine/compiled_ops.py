"""DeepSpeed's compiled ops: built once per environment before training, with a message.

DeepSpeed compiles an op at its first use with c++ and ninja and keeps it in torch's extension directory. By
itself it does so in silence and on every rank at once. Also, torch 2.13 guards the directory by a file named
`lock`: a killed compilation leaves it behind, and every later run waits for it for ever
(https://github.com/pytorch/pytorch/issues/189245). No longer needed when
`test_compiled_ops.py::test_torch_waits_for_a_lock_file_that_a_killed_process_left` fails.

Here every environment has its own directory below $TORCH_EXTENSIONS_DIR or the project's cache. One process
at a time holds a lock of the kernel's there, which ends with its holder. So a lock file of torch's in the
directory is left over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory, _import_module_from_library

from data.durable_files import cache_directory, locked
from ds_configs.findings import lookup
from launch.machine import description
from launch.ranks import ending, processes

Say = Callable[[str], None]

BUILT = "built"  # file in an op's directory after a complete compilation
LAST_LINES = 15  # of the compiler's output in an explanation
LINE_WIDTH = 300  # characters of each

TORCH_ADAM = """set "torch_adam": true in optimizer.params of the DeepSpeed JSON: torch's AdamW, same rule"""
NVME_OPS = ("PinMemoryBuilder", "AsyncIOBuilder")
NO_NVME = "offload to memory instead of NVMe: --ds_config zero3_offload"


class CompileError(RuntimeError):
    """A failure to compile or load an op, with the compiler's last lines and the fix."""


def needed(ds: dict[str, Any]) -> tuple[str, ...]:
    """List the builder classes of the ops that DeepSpeed's engine will use under the resolved JSON `ds`."""
    offloaded = [
        lookup(ds, f"zero_optimization.offload_{kind}.device")
        for kind in ("optimizer", "param")
    ]
    adam = "CPUAdamBuilder" if offloaded[0] in ("cpu", "nvme") else "FusedAdamBuilder"
    ours = str(lookup(ds, "optimizer.type")).lower() in ("lamb", "muon")
    by_torch = ours or lookup(ds, "optimizer.params.torch_adam") is True
    ops = () if by_torch or "optimizer" not in ds else (adam,)
    return (*ops, *NVME_OPS) if "nvme" in offloaded else ops


def prepare(ds: dict[str, Any], group: dist.ProcessGroup, say: Say = print) -> None:
    """Compile every op of `ds`, and load it on every rank of `group`, all of the run. Collective.

    Rank 0 compiles first, then the first rank of every other machine, unless they share the directory; then
    the others load. If an op cannot be built, the run ends with exit code 1 on every rank and one
    explanation.
    """
    ops = needed(ds)
    if not ops:
        return
    use_own_directory()
    own_turn = 0
    if processes.rank() > 0:
        own_turn = 1 if processes.local_rank() == 0 else 2
    for turn in range(3):
        failure = None
        if turn == own_turn:
            try:
                for op in ops:
                    build(op, say)
            except CompileError as e:
                failure = str(e)
        for text in processes.texts_of_all([failure], group):
            ending.refuse(text, code=1)


def use_own_directory() -> Path:
    """Set torch's directory of compiled ops to this environment's own, in this process."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(chosen) if chosen else cache_directory() / "compiled_ops"
    key = environment_key()
    if key in root.name:  # a second run in this process
        return root
    directory = root / key
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / ".locks", "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # a file system without locks, which other machines may see
            directory = directory.with_name(f"{key}-{socket.gethostname()}")
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
    return directory


def environment_key() -> str:
    """Name the environment of a compiled op: interpreter, packages, compiler, processors."""
    device = next((gpu.name for gpu in description.gpus()), "cpu")
    installed = [
        os.stat(str(package.__file__)).st_mtime_ns for package in (torch, deepspeed)
    ]
    compiler = [
        os.environ.get(name) for name in ("CXX", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST")
    ]
    facts = [
        sys.prefix,
        *installed,
        *compiler,
        torch.version.cuda,
        description.cpu_model(),
        device,
    ]
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
    python = "".join(platform.python_version_tuple()[:2])
    return (
        f"py{python}-torch{torch.__version__}-deepspeed{deepspeed.__version__}-{digest}"
    )


def build(op: str, say: Say = print) -> None:
    """Load `op`, and compile it first if needed. Raises CompileError."""
    builder = get_accelerator().create_op_builder(op)
    if builder is None or _installed(builder.name):
        return  # DeepSpeed itself judges an accelerator without this op
    try:
        directory = Path(_get_build_directory(builder.name, False))
        with locked(directory / BUILT, f"DeepSpeed's {builder.name}", say) as held:
            if held:
                # torch's, of a killed process
                (directory / "lock").unlink(missing_ok=True)
            if not _load_built(builder, directory):
                say(
                    f"compiling DeepSpeed's {builder.name}, once per environment (about 40 s) …"
                )
                builder.load(verbose=False)
                (directory / BUILT).touch()
    # torch, ninja, compiler, file system, dynamic linker: each raises its own type
    except Exception as e:
        way_round = NO_NVME if op in NVME_OPS else TORCH_ADAM
        raise CompileError(_explanation(builder.name, e, way_round)) from e


def _load_built(builder: Any, directory: Path) -> bool:
    """Load a completely compiled op, without its builder's 2 s check of sources; False: there is none."""
    name = builder.name
    loaded = builder._loaded_ops
    if name not in loaded and (directory / BUILT).exists():
        with contextlib.suppress(ImportError, OSError):  # damaged: it is compiled again
            loaded[name] = _import_module_from_library(name, str(directory), True)
    return name in loaded


def _installed(name: str) -> bool:
    """Check whether DeepSpeed was installed with this op compiled (DS_BUILD_OPS=1)."""
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(name)) and accelerator_name == get_accelerator()._name


def _explanation(name: str, error: Exception, way_round: str) -> str:
    # ninja repeats each command, a thousand characters wide, before the compiler's words.
    words = [
        w
        for w in str(error).splitlines()
        if w.strip() and "-DTORCH_EXTENSION_NAME=" not in w
    ]
    told = (
        "\n".join(f"  | {w[:LINE_WIDTH]}" for w in words[-LAST_LINES:])
        or f"  | {type(error).__name__}"
    )
    place = ", or TORCH_EXTENSIONS_DIR to a directory that can be written"
    writable = place if isinstance(error, OSError) else ""
    return (
        f"DeepSpeed's {name} could not be compiled:\n{told}\n"
        "it needs a C++ compiler, ninja and Python's headers (Debian and Ubuntu: "
        f"apt-get install g++ ninja-build python3-dev). Install what is missing{writable}, or {way_round}"
    )
