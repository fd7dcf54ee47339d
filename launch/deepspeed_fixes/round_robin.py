"""ZeRO 1 and 2 take each parameter for another under `round_robin_gradients`.

DeepSpeed 0.19.8, `_link_all_hp_params` of `runtime/zero/stage_1_and_2.py`: parameters are placed in turn and
linked with their fp32 numbers in the order of their group. Its step does not use the links. What is read by
them, checkpoints and moments, is another tensor's.
Upstream: no issue (docs/upstream_errors.md). No longer needed when its reproduction in
`tests/launch/experiments/proving/test_upstream_errors.py` fails.
"""

from __future__ import annotations

from typing import Any


def link_in_order(optimizer: Any) -> None:
    """Link parameters and their fp32 numbers in the order of memory."""
    groups = optimizer.bit16_groups
    optimizer.bit16_groups = optimizer.round_robin_bit16_groups
    optimizer._link_all_hp_params()
    optimizer.bit16_groups = groups
