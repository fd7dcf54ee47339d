"""DeepSpeed loses the optimizer states of all parameter groups but the first.

DeepSpeed 0.19.8, `_optimizer_step` of `runtime/zero/stage_1_and_2.py`: ZeRO 1 and 2 step one parameter group
after the other, and link the optimizer's states to the parameters, once and for all, after the first group's
first step, when the other groups have none yet. `safe_get_full_optimizer_state` then fails for every
parameter of the other groups.
Upstream: the linking after the first step came with https://github.com/deepspeedai/DeepSpeed/pull/5104; no
    issue found. No longer needed when
    `test_upstream_symptoms.py::test_only_the_first_group_has_its_optimizer_states_linked` fails.
"""

from __future__ import annotations

from deepspeed.runtime.engine import DeepSpeedEngine


def link_optimizer_states(engine: DeepSpeedEngine) -> None:
    """Link the states of all parameter groups, after a step of ZeRO 1 or 2; else does nothing."""
    if getattr(engine.optimizer, "_hp_optimizer_states_linked", False):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
