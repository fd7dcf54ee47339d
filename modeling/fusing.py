"""Functions that run as one kernel on a GPU, also where the model around them is not compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modeling.sparse_attention import has_gpu_compiler

_compiled = functools.cache(torch.compile)


def fuses(x: Tensor) -> bool:
    """Check whether `fused` compiles functions of `x`: on a GPU with a compiler, in an eager model."""
    return x.device.type != "cpu" and not torch.compiler.is_compiling() and has_gpu_compiler()


def fused(function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    """Return function(x, *arguments), without gradients, and computed by one kernel if `fuses(x)`."""
    return (_compiled(function) if fuses(x) else function)(x, *arguments)
