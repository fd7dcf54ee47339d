"""DeepSpeed imports Muon for every optimizer, and its import loads torch's compiler.

DeepSpeed 0.19.8, `runtime/zero/muon/original_muon.py`: functions there have the decorator
`@compiler.compile()`, and ZeRO's optimizers import them to test for a Muon. Nothing is compiled yet, but
torch.compile loads inductor, which takes 0.7 s at the start of every run.
Upstream: no issue found. No longer needed when
`test_start_up.py::test_importing_muon_loads_the_compiler` fails.
"""

import importlib
from unittest import mock

from deepspeed.runtime import compiler


def leave_out_compilation() -> None:
    """Import Muon now, uncompiled: no run steps it (muon.py says why)."""
    with mock.patch.object(compiler, "compile", lambda: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
