"""DeepSpeed ends a run at the smallest loss scale with a bare Exception.

DeepSpeed 0.19.8, `runtime/fp16/loss_scaler.py`: where an overflow meets fp16.min_loss_scale, `update_scale`
raises `Exception` with the words "Current loss scale already at minimum - cannot decrease scale anymore.
Exiting run." No `except` clause can tell it from another error, and it says neither what it means nor what to
do.
Upstream: https://github.com/deepspeedai/DeepSpeed/issues/5426, closed without a change of the code.
No longer needed when `test_upstream_symptoms.py::test_the_floor_of_the_loss_scale_is_a_bare_exception` fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

THEIR_WORDS = "loss scale already at minimum"


class LossScaleAtFloor(RuntimeError):
    """Gradients overflow at the smallest loss scale that the JSON allows."""


@contextlib.contextmanager
def named_floor() -> Iterator[None]:
    """Raise LossScaleAtFloor where DeepSpeed raises its bare Exception."""
    try:
        yield
    except Exception as e:
        if THEIR_WORDS not in str(e):
            raise
        raise LossScaleAtFloor(str(e)) from None
