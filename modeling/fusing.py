"""Functions that run as one kernel on a GPU, also where the model around them is not compiled."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_compiled = functools.cache(torch.compile)
_given_up: list[bool] = []  # not empty: this process compiles no kernel any more


def has_gpu_compiler() -> bool:
    """Check whether torch.compile can make code for the GPU that trains."""
    return not _given_up and not missing_for_kernels()


@functools.cache
def missing_for_kernels() -> tuple[str, ...]:
    """List what is missing for a GPU's kernels: Triton compiles a C program that includes Python.h."""
    from torch.utils._triton import has_triton

    missing = []
    if not has_triton():
        missing.append("Triton for this GPU")
    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang"))
    if not any(map(shutil.which, compilers)):
        missing.append("C compiler")
    searched = filter(None, os.environ.get("CPATH", "").split(os.pathsep))
    folders = [sysconfig.get_path("include"), *searched]
    if not any(Path(folder, "Python.h").exists() for folder in folders):
        missing.append("Python.h")
    return tuple(missing)


def failure_of_kernels(device: torch.device) -> str | None:
    """Compile a small kernel and run it on the GPU; return what is missing or went wrong, or None."""
    missing = missing_for_kernels()
    if missing:
        return f"no {', no '.join(missing)}"
    try:
        _compiled(_shifted)(torch.zeros(8, device=device))
    except Exception as error:  # of Triton, of the C compiler, of the driver
        first_line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {first_line[:200]}"
    return None


def give_up() -> None:
    """Compile no kernel from now on: torch's own take their place."""
    _given_up.append(True)


def _shifted(x: Tensor) -> Tensor:
    return torch.exp(x) + 1


def fuses(x: Tensor) -> bool:
    """Check whether `fused` compiles functions of `x`: on a GPU with a compiler, in an eager model."""
    return (
        x.device.type != "cpu"
        and not torch.compiler.is_compiling()
        and has_gpu_compiler()
    )


def fused(function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """Return function(x, *arguments), without gradients, and computed by one kernel if `fuses(x)`."""
    chosen = _compiled(function) if fuses(x) else function
    return chosen(x, *arguments)
