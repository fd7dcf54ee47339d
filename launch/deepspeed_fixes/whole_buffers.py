"""Buffers of a module in float32, which DeepSpeed rounded with the parameters in half precision.

0.18.9 calls `module.bfloat16()` and `module.half()` in runtime/engine.py; 0.19.7 and 0.19.8 cast parameters
alone. Symptom: rotary positions have frequencies of 8 bits, and far ones become alike.
`tests/launch/training/test_any_model.py` notices it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def keep_buffers(module: nn.Module) -> Callable[[], None]:
    """Keep the buffers of a module; return what puts them back once the engine is made."""
    whole = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def put_back() -> None:
        for name, buffer in module.named_buffers():
            buffer.data = whole[name].to(buffer.device)

    return put_back
