"""DeepSpeed 0.19.8 lets the loss scale grow before it unscales the step's gradients."""

from __future__ import annotations


def postpone_growth(engine) -> None:
    """Let the loss scale grow after the optimizer step instead of in the middle of it.

    DeepSpeed 0.19.8 doubles the scale at the end of a loss_scale_window before it unscales that step's gradients, which
    halves them (and under ZeRO-3 the reported norm).
    """
    update = engine.optimizer._update_scale
    postponed: list[bool] = []

    def update_on_overflow(has_overflow: bool = False) -> None:
        if has_overflow:
            update(True)
        else:
            postponed.append(True)

    def settle() -> None:
        while postponed:
            postponed.pop()
            update(False)

    engine.optimizer._update_scale = update_on_overflow
    engine.settle_loss_scale = settle
