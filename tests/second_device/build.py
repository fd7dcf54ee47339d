"""Build the second device once per environment, in a directory of the environment's own.

Tests give emulated machines caches of their own, in which it would be built again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from data.durable_files import locked

SOURCES = sorted((Path(__file__).parent / "device").iterdir())
NAME = "board_C"
BUILT = "built"  # file in the directory after a complete compilation


def missing() -> list[str]:
    """List the missing tools."""
    there = {"g++": shutil.which(os.environ.get("CXX", "g++")), "ninja": _ninja()}
    return [name for name, path in there.items() if not path]


def load() -> ModuleType:
    """Load the device, and compile it first where these sources and this torch have not met: some 30 s."""
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / BUILT, "the second device", lambda text: print(text, file=sys.stderr)) as held:
        if held:
            (directory / "lock").unlink(missing_ok=True)  # torch's, of a killed process
        if not (directory / BUILT).exists():
            _ninja()
            main = next(path for path in SOURCES if path.suffix == ".cpp")
            flags = ["-O1", "-std=c++20", "-DUSE_C10D_GLOO"]
            cpp_extension.load(NAME, [str(main)], build_directory=str(directory), extra_cflags=flags)
            (directory / BUILT).touch()
    return cpp_extension._import_module_from_library(NAME, str(directory), True)


def _directory() -> Path:
    torch_file = os.stat(str(torch.__file__)).st_mtime_ns
    facts = [platform.python_version(), torch_file, platform.processor(), os.environ.get("CXX")]
    digest = hashlib.sha256(repr(facts).encode() + b"".join(path.read_bytes() for path in SOURCES))
    return Path(sys.prefix) / f"second_device-torch{torch.__version__}-{digest.hexdigest()[:8]}"


def _ninja() -> str | None:
    """Find ninja, also next to the interpreter, where its wheel puts it; torch looks for it on PATH."""
    folder = os.path.dirname(sys.executable)
    if not shutil.which("ninja") and os.path.exists(os.path.join(folder, "ninja")):
        os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", "")
    return shutil.which("ninja")


if __name__ == "__main__":
    load()
