"""Which precision a run has: what the JSON demands, else what the recipe asks for, else what the machine has."""

from __future__ import annotations

from typing import Any, Literal

from ds_configs.findings import Report
from ds_configs.known_keys import lookup
from ds_configs.plan import Machine, Precision
from recipes.schema import Recipe

_HALVES: tuple[Precision, Precision] = ("fp16", "bf16")


def precision(
    recipe: Recipe, config: dict[str, Any], stage: int | None, machine: Machine, report: Report
) -> Precision | None:
    """The precision, with notices where it is not the recipe's; None where the problems leave none.

    An explicit `"enabled": true` is never changed. "auto" takes the recipe's precision and falls to bf16, then fp32, where the
    machine lacks it. An absent section is off, as in DeepSpeed.
    """
    switches = {half: _switch(half, config, report) for half in _HALVES}
    _check_autocast(config, report)
    if None in switches.values():
        return None
    demanded = [half for half in _HALVES if switches[half] is True]
    if len(demanded) == 2:
        report.problem(
            f"{report.where}: fp16.enabled and bf16.enabled are both true: a run has one precision; set one to false"
        )
        return None
    chosen = (
        _demanded(demanded[0], recipe, machine, report)
        if demanded
        else _asked(switches, recipe, machine, report)
    )
    if stage == 0 and chosen in _HALVES:
        _check_accumulation(chosen, config, report)
    return chosen


def _switch(half: str, config: dict[str, Any], report: Report) -> bool | Literal["auto"] | None:
    value = lookup(config, f"{half}.enabled")
    if value is None:
        return False
    if value == "auto" or isinstance(value, bool):
        return value  # type: ignore[no-any-return]
    report.problem(
        f'{report.where}: {half}.enabled={value!r}: must be true, false or "auto"; write one of them'
    )
    return None


def _has(machine: Machine, half: str) -> bool:
    return {"fp16": machine.fp16 or machine.emulated_fp16, "bf16": machine.bf16, "fp32": True}[half]


def _demanded(half: Precision, recipe: Recipe, machine: Machine, report: Report) -> Precision | None:
    if not _has(machine, half):
        other = "bf16" if half == "fp16" and machine.bf16 else "fp32"
        report.problem(
            f"{report.where}: {half}.enabled=true: the {machine.accelerator} accelerator of this machine has no {half}, and what "
            f'is demanded is not changed silently; --ds_config {other}, or set {half}.enabled to "auto" (falls to {other})'
        )
        return None
    if recipe.precision != half:
        report.notice(f"precision: {half}, as {report.where} says; the recipe asks for {recipe.precision}")
    _say_emulated(half, machine, report)
    return half


def _asked(switches: dict[Precision, Any], recipe: Recipe, machine: Machine, report: Report) -> Precision:
    wanted = recipe.precision
    if wanted == "fp32":
        return "fp32"
    if switches[wanted] is False:
        report.notice(
            f"precision: fp32, as {report.where} says ({wanted} is off there); the recipe asks for {wanted}"
        )
        return "fp32"
    if _has(machine, wanted):
        _say_emulated(wanted, machine, report)
        return wanted
    fallback: Precision = "fp32"
    if wanted == "fp16" and machine.bf16 and switches["bf16"] == "auto":
        fallback = "bf16"
    report.notice(
        f"precision: {fallback} INSTEAD OF {wanted}: the recipe asks for {wanted}, which the {machine.accelerator} accelerator "
        "of this machine lacks"
    )
    return fallback


def _say_emulated(half: str, machine: Machine, report: Report) -> None:
    if half == "fp16" and machine.emulated_fp16:
        report.notice(
            f"precision: fp16 is EMULATED on the {machine.accelerator} accelerator: right in its numbers, slow"
        )


def _check_accumulation(chosen: Precision, config: dict[str, Any], report: Report) -> None:
    wanted = lookup(config, "data_types.grad_accum_dtype")
    if wanted not in (None, chosen):
        report.problem(
            f"{report.where}: data_types.grad_accum_dtype={wanted} with {chosen} and zero_optimization.stage=0: DeepSpeed accumulates "
            f"gradients in {chosen} there; remove the key, or --ds_config zero1 (stage 1), which accumulates in another precision"
        )


def _check_autocast(config: dict[str, Any], report: Report) -> None:
    if lookup(config, "torch_autocast.enabled"):
        report.problem(
            f"{report.where}: torch_autocast.enabled=true: precision is set by fp16 and bf16 here (DeepSpeed reports a scaled "
            "gradient norm under autocast, so that clipping is wrong); set it to false and bf16.enabled to true"
        )
