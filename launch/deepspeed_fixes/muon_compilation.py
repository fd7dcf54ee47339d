"""DeepSpeed imports Muon for every optimizer, and its import loads torch's compiler.

DeepSpeed 0.19.8, `runtime/zero/muon/original_muon.py`: functions there have the decorator
`@compiler.compile()`, and ZeRO's optimizers import them to test for a Muon. Nothing is compiled yet, but
torch.compile loads inductor, which takes 0.7 s at the start of every run.
Upstream: no issue found. No longer needed when
`test_start_up.py::test_importing_muon_loads_the_compiler` fails.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime import compiler


def postpone_compilation() -> None:
    """Import Muon now, but call torch.compile at the first call of its iteration."""
    with mock.patch.object(compiler, "compile", lambda: _at_first_call):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def _at_first_call(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Callable[..., Any]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call
