"""The `optimizer` section and clipping: "auto" from the recipe, no disagreement, no op without a compiler."""

from __future__ import annotations

import math
from typing import Any

from ds_configs import following
from ds_configs.findings import Disagreement, Findings, lookup, shown, to_set
from ds_configs.following import PARAMS, TYPES
from ds_configs.plan import Machine, Offload
from recipes.problems import Setting, Text
from recipes.schema import DEEPSPEED_SCHEDULES, Recipe

_WRITTEN = {"adamw": "AdamW", "lamb": "Lamb"}  # the recipe's name -> DeepSpeed's
_ON_GPU = ("none", "parameters")  # where the accelerator steps the optimizer
_OF_ADAM = ("torch_adam", "fused", "foreach", "fp32_optimizer_states")
_OF_LAMB = ("min_coeff", "max_coeff")


def check(recipe: Recipe, stage: int | None, findings: Findings) -> None:
    """Refuse another optimizer and other numbers than the recipe's, and LAMB on sharded parameters."""
    name = recipe.optimizer.name
    key = "optimizer.type"
    setting = Setting("optimizer.name", name)
    written = _WRITTEN[name]
    _check_numbers(recipe, findings)
    if name == "lamb" and stage != 0:
        came: Text = (setting, f" with zero_optimization.stage={stage}")
        rule = "LAMB scales a step by the norm of a whole parameter, and ZeRO shards them in flat pieces"
        fix = "--ds_config zero0, or set optimizer.name to adamw"
        findings.refuse(setting.key, rule, fix, came)
        return
    kind = findings.stated(key)
    theirs = TYPES.get(str(kind).lower())
    if kind is not None and theirs != name:
        rule = f"the recipe's optimizer.name is {name}, and another rule of descent is another recipe"
        own: tuple[Setting, ...] = (
            (Setting("optimizer.name", theirs),) if theirs else ()
        )
        elsewhere = " --ds_config zero0" if theirs == "lamb" and stage != 0 else ""
        findings.refuse(
            key, rule, (f'write "auto" or "{written}"', *to_set(own), elsewhere)
        )
    if name == "adamw":
        _check_adamw(recipe, str(kind).lower(), findings)
    else:
        _check_lamb(recipe, findings)


def _check_adamw(recipe: Recipe, kind: str, findings: Findings) -> None:
    """Refuse decay that is added to the gradient, and keys of LAMB's. `kind`: as the JSON names it."""
    key = f"{PARAMS}.adam_w_mode"
    if (
        findings.stated(key) is False
        and kind != "adamw"
        and recipe.optimizer.weight_decay
    ):
        rule = "adds the decay to the gradient, while the recipe's adamw decays weights apart from it"
        findings.refuse(key, rule, "remove the key")
    for name in _OF_LAMB:
        key = f"{PARAMS}.{name}"
        if findings.lookup(key) is not None and TYPES.get(kind) != "lamb":
            findings.refuse(key, "is a key of Lamb's, not of AdamW's", "remove the key")


def _check_lamb(recipe: Recipe, findings: Findings) -> None:
    """Refuse keys of Adam's, a fixed loss scale, and the model of transformers."""
    setting = Setting("optimizer.name", recipe.optimizer.name)
    written = _WRITTEN[recipe.optimizer.name]
    if recipe.model.implementation == "transformers":
        came = (setting, " with ", Setting("model.implementation", "transformers"))
        findings.refuse(
            setting.key, "its Trainer steps AdamW", "set optimizer.name to adamw", came
        )
    for name in _OF_ADAM:
        key = f"{PARAMS}.{name}"
        if findings.lookup(key) is not None:
            findings.refuse(
                key, f"is a key of Adam's, not of {written}'s", "remove the key"
            )
    if findings.stated("fp16.loss_scale"):
        rule = "DeepSpeed runs LAMB with a loss scale that moves, and with no fixed one"
        fix = "write 0, and the first scale as fp16.initial_scale_power"
        findings.refuse("fp16.loss_scale", rule, fix)


def _check_numbers(recipe: Recipe, findings: Findings) -> None:
    """Refuse other numbers than the recipe's, and a schedule that is not the recipe's."""
    kind = findings.stated("scheduler.type")
    params = findings.lookup("scheduler.params") or {}
    left_open = params and all(value == "auto" for value in params.values())
    if kind not in (None, *DEEPSPEED_SCHEDULES) and not left_open:
        rule = f"a recipe has DeepSpeed's schedules {', '.join(DEEPSPEED_SCHEDULES)}, and Megatron-LM's"
        findings.refuse("scheduler.type", rule, "remove the section")
    own = _own(recipe)
    schedule = list[Setting]()
    for each in following.numbers(findings.config, recipe):
        value = lookup(own, each.key)
        if each.key == "optimizer.name" or _equal(each.value, value):
            continue
        if each.source.startswith("scheduler."):
            schedule.append(Setting(each.key, each.value))
        elif not each.by_default:
            settings = [Setting(each.key, each.value)]
            lowest = (
                following.lowest_rate(recipe, each.value)
                if each.key == "optimizer.lr"
                else None
            )
            if lowest not in (None, recipe.schedule.min_lr):
                settings.append(Setting("schedule.min_lr", lowest))
            findings.disagreement(each.source, Setting(each.key, value), settings)
    if schedule:
        fix = "remove the section", *to_set(schedule)
        came = (
            f"scheduler.type={shown(kind)} disagrees with the recipe's ",
            Setting("schedule.kind", recipe.schedule.kind),
        )
        findings.problems.append(
            Disagreement("scheduler", came, "one of them decides", fix, findings.where)
        )


def _own(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain data, with LAMB's trust ratios spelt out."""
    own = recipe.model_dump(mode="json", by_alias=True)
    if recipe.optimizer.name == "lamb":
        own["optimizer"] |= dict(
            zip(_OF_LAMB, recipe.optimizer.trust_ratios, strict=True)
        )
    return own


def fills(
    recipe: Recipe, offload: Offload, machine: Machine, findings: Findings
) -> dict[str, Any]:
    """Return values by dotted key: the recipe's numbers, and the choice of AdamW.

    The choice is torch's fused kernel, which compiles nothing and resumes exactly; on a CPU it is as fast as
    DeepSpeed's compiled CPU Adam. DeepSpeed's Adam steps only if DeepSpeed or the JSON demands it.
    """
    own = _own(recipe)["optimizer"]
    lamb = recipe.optimizer.name == "lamb"
    names = (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        *(("bias_correction", *_OF_LAMB) if lamb else ()),
    )
    values: dict[str, Any] = {f"{PARAMS}.{name}": own[name] for name in names}
    values["gradient_clipping"] = own["clip"]
    values["optimizer.type"] = _WRITTEN[recipe.optimizer.name]
    # Held against the recipe, which decides.
    params = findings.lookup(PARAMS) or {}
    for key in ("lr", "adam_w_mode", "bias_correction"):
        params.pop(key, None)
    if not lamb:
        values |= _adamw(recipe, offload, machine, findings)
    return values


def _adamw(
    recipe: Recipe, offload: Offload, machine: Machine, findings: Findings
) -> dict[str, Any]:
    """Return the choice between torch's AdamW and DeepSpeed's; refuse keys of the other one."""
    key = f"{PARAMS}.torch_adam"
    offloads = offload not in _ON_GPU
    asked = _asks_for_deepspeeds(findings, offload)
    written = findings.stated(key)
    torch_adam = asked is None if written is None else written is True
    values = {key: torch_adam}
    missing = (
        "nvcc (the CUDA toolkit)" if not (offloads or machine.cuda_compiler) else ""
    )
    missing = (
        missing if machine.compiler else "a C++ compiler (g++, ninja, Python's headers)"
    )
    if missing and not torch_adam:
        fix = "install it, or remove the key: torch's AdamW steps as fast"
        rule = "DeepSpeed's Adam is compiled at first use"
        findings.refuse(
            key, rule, fix, f"{asked or f'{key}=false'}, but {missing} is missing"
        )
    foreach, fused = both = f"{PARAMS}.foreach", f"{PARAMS}.fused"
    corrects = recipe.optimizer.bias_correction
    if not corrects:
        values[f"{PARAMS}.bias_correction"] = False
    if torch_adam and corrects and not findings.stated(foreach):
        values[fused] = True
    if all(findings.stated(key) for key in both):
        came = f"{foreach} and {fused} are both true"
        findings.refuse(
            fused,
            "they are two forms of one step",
            "remove foreach: fused is the faster one",
            came,
        )
    of_torch = (
        "is read by torch's AdamW alone",
        "remove the key, or set torch_adam to true",
    )
    states = (
        "is read by DeepSpeed's CPU Adam alone, which steps an offloaded optimizer",
        "remove the key, or offload the optimizer without torch_adam",
    )
    for key, wrong, (rule, fix) in (
        (f"{PARAMS}.fp32_optimizer_states", torch_adam or not offloads, states),
        (foreach, not (torch_adam and corrects), of_torch),
        (fused, not (torch_adam and corrects), of_torch),
    ):
        if wrong and findings.lookup(key) is not None:
            findings.refuse(key, rule, fix)
    if torch_adam and offloads:
        key = "zero_force_ds_cpu_optimizer"
        if findings.stated(key):
            rule = "demands DeepSpeed's compiled CPU Adam"
            fix = "remove the key, or torch_adam"
            findings.refuse(key, rule, fix, beside=" with torch's AdamW")
        values[key] = False
    return values


def _asks_for_deepspeeds(findings: Findings, offload: Offload) -> str | None:
    """Return the setting that demands DeepSpeed's own compiled CPU Adam, or None."""
    if offload in _ON_GPU:
        return None
    zero = "zero_optimization.offload_optimizer"
    halves = [f"{half}.{half}_master_weights_and_grads" for half in ("fp16", "bf16")]
    for key, usual in (
        *(
            (key, (None, False))
            for key in (*halves, f"{zero}.super_offload", "zero_force_ds_cpu_optimizer")
        ),
        (f"{PARAMS}.fp32_optimizer_states", (None,)),
        (f"{zero}.ratio", (None, 1)),
    ):
        if findings.stated(key) not in usual:
            return f"{key}={shown(findings.stated(key))}"
    return "NVMe offload" if offload == "nvme" else None


def _equal(written: Any, value: Any) -> bool:
    """Compare values; JSON may have 1 for 1.0."""
    if isinstance(value, float) and isinstance(written, (int, float)):
        return math.isclose(written, value, rel_tol=1e-12)  # a rate may be a product
    return bool(written == value)
