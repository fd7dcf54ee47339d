"""The precision of a run: the JSON's demand, else the recipe's wish, else the machine's ability."""

from __future__ import annotations

from typing import Literal

from ds_configs.findings import Findings
from ds_configs.plan import Machine, Precision
from recipes.schema import Recipe

_Switches = dict[Precision, bool | Literal["auto"]]
_HALVES: tuple[Precision, Precision] = ("fp16", "bf16")


def precision(
    recipe: Recipe, stage: int | None, machine: Machine, findings: Findings
) -> Precision | None:
    """Choose the precision, with a notice if it is not the recipe's; None if there are problems.

    An explicit `"enabled": true` is never changed. "auto" takes the recipe's precision and falls to the
    other half precision, then fp32, if the machine lacks it. An absent section is off, as in DeepSpeed.
    """
    switches: _Switches = {
        half: findings.lookup(f"{half}.enabled") or False for half in _HALVES
    }
    demanded = [half for half in _HALVES if switches[half] is True]
    if len(demanded) == 2:
        findings.refuse(
            "fp16.enabled",
            "a run has one precision",
            "set one to false",
            "fp16.enabled and bf16.enabled are both true",
        )
        return None
    chosen: Precision | None
    if demanded:
        chosen = _demanded(demanded[0], recipe, machine, findings)
    else:
        wanted = (
            _of_machine(switches, machine)
            if recipe.precision == "auto"
            else recipe.precision
        )
        chosen = _asked(switches, wanted, machine, findings)
    if chosen == "bf16" and machine.slow_bf16:
        slow = "this CPU has no instructions for it, and a product takes many times as long as in fp32"
        findings.notice("precision", f"bf16 IS SLOW here: {slow}; --set precision=fp32")
    if chosen == "fp16" and machine.emulated_fp16:
        device = f"the {machine.device.name} accelerator"
        findings.notice(
            "precision", f"fp16 is EMULATED on {device}: right in its numbers, slow"
        )
    if chosen:
        _check_types(chosen, stage, findings)
        _check_masters(chosen, stage, findings)
    return chosen


def _has(machine: Machine, half: Precision) -> bool:
    return {
        "fp16": machine.fp16 or machine.emulated_fp16,
        "bf16": machine.bf16,
        "fp32": True,
    }[half]


def _of_machine(switches: _Switches, machine: Machine) -> Precision:
    """Choose the machine's fastest precision that the JSON allows, for precision=auto."""
    if machine.bf16 and not machine.slow_bf16 and switches["bf16"]:
        return "bf16"
    return (
        "fp16"
        if machine.fp16 and machine.device.own_memory and switches["fp16"]
        else "fp32"
    )


def _demanded(
    half: Precision, recipe: Recipe, machine: Machine, findings: Findings
) -> Precision | None:
    if not _has(machine, half):
        other = "bf16" if half == "fp16" and machine.bf16 else "fp32"
        key = f"{half}.enabled"
        lacks = f"the {machine.device.name} accelerator of this machine has no {half}"
        findings.refuse(
            key,
            f"{lacks}, and what is demanded is not changed silently",
            f'--ds_config {other}, or set {key} to "auto" (falls to {other})',
        )
        return None
    if recipe.precision not in (half, "auto"):
        asks = f"the recipe asks for {recipe.precision}"
        findings.notice("precision", f"{half}, as {findings.where} says; {asks}")
    return half


def _asked(
    switches: _Switches, wanted: Precision, machine: Machine, findings: Findings
) -> Precision:
    if wanted == "fp32":
        return "fp32"
    asks = f"the recipe asks for {wanted}"
    if not switches[wanted]:
        findings.notice(
            "precision",
            f"fp32, as {findings.where} says ({wanted} is off there); {asks}",
        )
        return "fp32"
    if _has(machine, wanted):
        return wanted
    other: Precision = "bf16" if wanted == "fp16" else "fp16"
    fast = machine.bf16 and not machine.slow_bf16
    # an emulation is slower than fp32
    there = fast if other == "bf16" else machine.fp16
    fallback: Precision = other if there and switches[other] else "fp32"
    lacks = f"which the {machine.device.name} accelerator of this machine lacks"
    findings.notice("precision", f"{fallback} INSTEAD OF {wanted}: {asks}, {lacks}")
    return fallback


def _check_types(chosen: Precision, stage: int | None, findings: Findings) -> None:
    """Refuse other types of parameters and sums, and a smallest loss scale above the first one."""
    key = "data_types.grad_accum_dtype"
    if (
        stage == 0
        and chosen in _HALVES
        and findings.stated(key) not in (None, chosen, "fp32")
    ):
        findings.refuse(
            key,
            f"gradients are summed in {chosen} or fp32 there",
            "remove the key",
            beside=f" with {chosen} and zero_optimization.stage=0",
        )
    key = "data_types.param_dtype"
    if findings.stated(key) not in (None, chosen):
        findings.refuse(
            key,
            "fp16 and bf16 decide the precision of the parameters",
            "remove the key",
            beside=f" in a run of {chosen}",
        )
    key = "fp16.min_loss_scale"
    first = "fp16.initial_scale_power"
    power = 16 if findings.stated(first) is None else findings.stated(first)
    searched = not findings.stated("fp16.loss_scale")
    if searched and chosen == "fp16" and findings.stated(key) == 0:
        findings.refuse(key, "a scale that is searched for ends above 0", "write 1")
    if searched and (findings.stated(key) or 1) > 2**power:
        findings.refuse(
            key,
            f"the search starts at 2^{power} = {2**power:,}, which is below",
            f"set {key} to 1",
            beside=f" with {first}={power}",
        )


def _check_masters(chosen: Precision, stage: int | None, findings: Findings) -> None:
    """Refuse half-precision weights in an optimizer that cannot step them."""
    stated = findings.stated
    for half in _HALVES:
        key = f"{half}.{half}_master_weights_and_grads"
        if not stated(key):
            continue
        offloaded = stated("zero_optimization.offload_optimizer.device") in (
            "cpu",
            "nvme",
        )
        states = half == "bf16" and stated("bf16.bf16_optimizer_states")
        if half != chosen:
            findings.refuse(
                key, f"is for {half}", "remove the key", beside=f" in a run of {chosen}"
            )
        elif stage == 0:
            findings.refuse(
                key,
                "is for sharded states",
                "remove the key (they are then fp32), or take stage 1, 2 or 3",
                beside=" with zero_optimization.stage=0",
            )
        elif not (offloaded or states) or (
            offloaded and stated("optimizer.params.torch_adam")
        ):
            findings.refuse(
                key,
                "only DeepSpeed's compiled CPU Adam steps such weights",
                "offload the optimizer (offload_optimizer) without torch_adam, or remove the key: fp32",
            )
        elif (
            offloaded
            and states
            and stated("optimizer.params.fp32_optimizer_states") is not False
        ):
            findings.refuse(
                "bf16.bf16_optimizer_states",
                "DeepSpeed's CPU Adam keeps its states in fp32 unless told otherwise",
                "set optimizer.params.fp32_optimizer_states to false",
            )
        else:
            kept = "weights and Adam's moments" if states else "weights"
            findings.notice(
                "optimizer",
                f"steps {kept} in {half}, as {findings.where} says, not in fp32",
            )
    key = "bf16.bf16_optimizer_states"
    needed = "bf16.bf16_master_weights_and_grads"
    if stated(key) and not stated(needed):
        findings.refuse(key, f"needs {needed}", "set that to true, or remove the key")
