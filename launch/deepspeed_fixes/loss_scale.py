"""DeepSpeed lets the loss scale grow before it unscales the step's gradients, and ends with a bare Exception.

DeepSpeed 0.19.8, `step` of `runtime/zero/stage_1_and_2.py` and `stage3.py`: at the end of an
fp16.loss_scale_window `_update_scale` doubles the scale. The gradients of that step, scaled by the old one,
are then divided by the new one: they are half as large as they should be, unless they are clipped. Under
ZeRO-3 the reported norm is halved, too.
Upstream: described in https://github.com/deepspeedai/DeepSpeed/pull/8588 (open); no issue. No longer needed
when `test_upstream_symptoms.py::test_a_growing_loss_scale_halves_the_norm_of_its_step` fails.

`update_scale` of `runtime/fp16/loss_scaler.py` raises `Exception` if gradients overflow at
fp16.min_loss_scale: no `except` clause can tell it from another error, and it gives no reason and no fix.
Upstream: https://github.com/deepspeedai/DeepSpeed/issues/5426, closed without a change of the code.
No longer needed when `test_upstream_symptoms.py::test_the_floor_of_the_loss_scale_is_a_bare_exception` fails.
"""

from __future__ import annotations

from deepspeed.runtime.engine import DeepSpeedEngine


def postpone_growth(engine: DeepSpeedEngine) -> None:
    """Move the growth of the loss scale from the step to `engine.settle_loss_scale()` after every step."""
    update = engine.optimizer._update_scale
    postponed: list[bool] = []

    def update_on_overflow(has_overflow: bool = False) -> None:
        if has_overflow:
            update(True)
        else:
            postponed.append(False)

    def settle() -> None:
        while postponed:
            update(postponed.pop())

    engine.optimizer._update_scale = update_on_overflow
    engine.settle_loss_scale = settle


def is_at_floor(error: Exception) -> bool:
    """Recognize DeepSpeed's error on an overflow at the smallest loss scale that the JSON allows."""
    return "loss scale already at minimum" in str(error)
