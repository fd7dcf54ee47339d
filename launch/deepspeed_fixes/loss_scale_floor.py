"""DeepSpeed ends a run at the smallest loss scale with a bare Exception.

DeepSpeed 0.19.8, `runtime/fp16/loss_scaler.py`: if gradients overflow at fp16.min_loss_scale, `update_scale`
raises `Exception` with the words "Current loss scale already at minimum - cannot decrease scale anymore.
Exiting run." No `except` clause can tell it from another error, and it gives no reason and no fix.
Upstream: https://github.com/deepspeedai/DeepSpeed/issues/5426, closed without a change of the code.
No longer needed when `test_upstream_symptoms.py::test_the_floor_of_the_loss_scale_is_a_bare_exception` fails.
"""


def is_at_floor(error: Exception) -> bool:
    """Recognize DeepSpeed's error on an overflow at the smallest loss scale that the JSON allows."""
    return "loss scale already at minimum" in str(error)
