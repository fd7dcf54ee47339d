"""Parameters whose gradients ZeRO 1 and 2 share out in turn, found where they lie in memory."""

from __future__ import annotations

from typing import Any


def link_in_order(optimizer: Any) -> None:
    """Link parameters and their fp32 numbers in the order of memory under `round_robin_gradients`.

    DeepSpeed links them in the order of their group, so that each is taken for another (0.18.9 to 0.19.8;
    docs/upstream_errors.md). Its steps do not use the links; what is read and saved by them does.
    """
    groups = optimizer.bit16_groups
    optimizer.bit16_groups = optimizer.round_robin_bit16_groups
    optimizer._link_all_hp_params()
    optimizer.bit16_groups = groups
