"""The `optimizer` section and clipping: "auto" from the recipe, no disagreement, no op without a compiler."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ds_configs import following
from ds_configs.findings import Disagreement, Findings, lookup, shown, to_set
from ds_configs.following import END, OF_LAMB, OF_MUON, PARAMS, SCHEDULES, TYPES
from ds_configs.plan import Machine, Offload
from recipes.problems import Setting, Text
from recipes.schema import Recipe

_WRITTEN = {
    "adamw": "AdamW",
    "lamb": "Lamb",
    "muon": "Muon",
}  # the recipe's name -> DeepSpeed's
_ON_GPU = ("none", "parameters")  # where the accelerator steps the optimizer
_OF_ADAM = ("torch_adam", "fused", "foreach", "fp32_optimizer_states")
_OF_ONE = {"lamb": OF_LAMB, "muon": OF_MUON}


def check(
    recipe: Recipe, stage: int | None, offload: Offload, findings: Findings
) -> None:
    """Refuse another optimizer and other numbers than the recipe's, and layouts that one cannot have."""
    name = recipe.optimizer.name
    key = "optimizer.type"
    setting = Setting("optimizer.name", name)
    written = _WRITTEN[name]
    _check_numbers(recipe, findings)
    if name == "lamb" and stage != 0:
        came: Text = (setting, f" with zero_optimization.stage={stage}")
        findings.refuse(
            setting.key,
            "LAMB scales a step by the norm of a whole parameter, and ZeRO shards them in flat pieces",
            "--ds_config zero0, or set optimizer.name to adamw",
            came,
        )
        return
    if name == "muon" and offload != "none":
        came = (setting, f" with {offload} offloaded")
        findings.refuse(
            setting.key,
            "Muon's products of matrices are the accelerator's work, and the host would make them",
            "--ds_config zero1, zero2 or zero3, or set optimizer.name to adamw",
            came,
        )
        return
    stated = findings.stated(key)
    kind = str(stated).lower()
    theirs = TYPES.get(kind)
    if kind == "muon" and name != "muon":
        rule = (
            "DeepSpeed's takes embeddings and tensor ranks' slices for matrices, and clips the update; ours "
            "is the recipe's"
        )
        findings.refuse(key, rule, 'write "auto" and set optimizer.name to muon')
    elif stated is not None and name not in (theirs, kind):
        rule = f"the recipe's optimizer.name is {name}, and another rule of descent is another recipe"
        own: tuple[Setting, ...] = (
            (Setting("optimizer.name", theirs),) if theirs else ()
        )
        elsewhere = " --ds_config zero0" if theirs == "lamb" and stage != 0 else ""
        findings.refuse(
            key, rule, (f'write "auto" or "{written}"', *to_set(own), elsewhere)
        )
    for reader, keys in _OF_ONE.items():
        if reader not in (name, kind):
            _refuse_keys(
                keys, f"{_WRITTEN[reader]}'s, not of {_WRITTEN[name]}'s", findings
            )
    if name == "adamw":
        _check_adamw(recipe, kind, findings)
    else:
        _check_own(recipe, findings)


def _check_adamw(recipe: Recipe, kind: str, findings: Findings) -> None:
    """Refuse decay that is added to the gradient. `kind`: as the JSON names it."""
    key = f"{PARAMS}.adam_w_mode"
    if (
        findings.stated(key) is False
        and kind != "adamw"
        and recipe.optimizer.weight_decay
    ):
        findings.refuse(
            key,
            "adds the decay to the gradient, while the recipe's adamw decays weights apart from it",
            "write true: the decay is then apart from it",
        )


def _refuse_keys(names: Iterable[str], told: str, findings: Findings) -> None:
    for name in names:
        key = f"{PARAMS}.{name}"
        if findings.lookup(key) is not None:
            findings.refuse(key, f"is a key of {told}", "remove the key")


def _check_own(recipe: Recipe, findings: Findings) -> None:
    """Refuse keys of Adam's, LAMB with a fixed loss scale, and the model of transformers."""
    setting = Setting("optimizer.name", recipe.optimizer.name)
    written = _WRITTEN[recipe.optimizer.name]
    if recipe.model.implementation == "transformers":
        came = (setting, " with ", Setting("model.implementation", "transformers"))
        findings.refuse(
            setting.key, "its Trainer steps AdamW", "set optimizer.name to adamw", came
        )
    _refuse_keys(_OF_ADAM, f"Adam's, not of {written}'s", findings)
    if recipe.optimizer.name == "lamb" and findings.stated("fp16.loss_scale"):
        findings.refuse(
            "fp16.loss_scale",
            "DeepSpeed runs LAMB with a loss scale that moves, and with no fixed one",
            "write 0, and the first scale as fp16.initial_scale_power",
        )


def _check_numbers(recipe: Recipe, findings: Findings) -> None:
    """Refuse other numbers than the recipe's, and a schedule that is not the recipe's."""
    kind = findings.stated("scheduler.type")
    check_schedule(kind, recipe, findings)
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
    wrong = any(each.key.startswith("scheduler.") for each in findings.problems)
    if schedule and not wrong:
        fix = "remove the section", *to_set(schedule)
        came = (
            f"scheduler.type={shown(kind)} disagrees with the recipe's ",
            Setting("schedule.kind", recipe.schedule.kind),
        )
        findings.problems.append(
            Disagreement("scheduler", came, "one of them decides", fix, findings.where)
        )


def check_schedule(kind: Any, recipe: Recipe, findings: Findings) -> None:
    """Refuse schedules and parameters that there are not; notice that the recipe's kind trains."""
    if kind is None:
        return
    section = "scheduler.params"
    takes = SCHEDULES.get(kind)
    if takes is None:
        findings.refuse(
            "scheduler.type",
            f"a recipe has DeepSpeed's schedules {', '.join(SCHEDULES)}, and Megatron-LM's",
            "take one of these; without the section the rate is constant under --follow, else the recipe's",
        )
        return
    params = findings.lookup(section) or {}
    rule = f"DeepSpeed's {kind} takes {', '.join(takes)}, and fails at another"
    for name in params:
        if name not in (*takes, "last_batch_iteration"):
            findings.refuse(
                f"{section}.{name}",
                rule,
                "write these instead: a ratio is a share of lr, the highest rate",
            )
    if params and END in takes and END not in params:
        findings.refuse(
            f"{section}.{END}",
            f"{kind} fails without it",
            'write it, or "auto": the recipe\'s',
        )
    own = recipe.schedule.kind
    if following.is_open(findings.config) and kind != own:
        does = f'all numbers are "auto", and the recipe\'s {own} is what trains, not {kind}'
        findings.notice("scheduler", f"{does}; --follow takes the kind")


def _own(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain data, with the numbers of LAMB or Muon spelt out."""
    own = recipe.as_data()
    if recipe.optimizer.name == "muon":
        own["optimizer"] |= recipe.optimizer.of_muon
    if recipe.optimizer.name == "lamb":
        own["optimizer"] |= dict(
            zip(OF_LAMB, recipe.optimizer.trust_ratios, strict=True)
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
    name = recipe.optimizer.name
    more = {"lamb": ("bias_correction", *OF_LAMB), "muon": OF_MUON}
    names = ("lr", "betas", "eps", "weight_decay", *more.get(name, ()))
    values: dict[str, Any] = {f"{PARAMS}.{each}": own[each] for each in names}
    values["gradient_clipping"] = own["clip"]
    values["optimizer.type"] = _WRITTEN[name]
    # Held against the recipe, which decides.
    params = findings.lookup(PARAMS) or {}
    for key in ("lr", "adam_w_mode", "bias_correction"):
        params.pop(key, None)
    if name == "adamw":
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
        findings.refuse(
            key,
            "DeepSpeed's Adam is compiled at first use",
            "install it, or remove the key: torch's AdamW steps as fast",
            f"{asked or f'{key}=false'}, but {missing} is missing",
        )
    foreach = f"{PARAMS}.foreach"
    fused = f"{PARAMS}.fused"
    corrects = recipe.optimizer.bias_correction
    if not corrects:
        values[f"{PARAMS}.bias_correction"] = False
    if torch_adam and corrects and not findings.stated(foreach):
        values[fused] = True
    if findings.stated(foreach) and findings.stated(fused):
        findings.refuse(
            fused,
            "they are two forms of one step",
            "remove foreach: fused is the faster one",
            f"{foreach} and {fused} are both true",
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
            findings.refuse(
                key,
                "demands DeepSpeed's compiled CPU Adam",
                "write false, or set torch_adam to false",
                beside=" with torch's AdamW",
            )
        values[key] = False
    return values


def _asks_for_deepspeeds(findings: Findings, offload: Offload) -> str | None:
    """Return the setting that demands DeepSpeed's own compiled CPU Adam, or None."""
    if offload in _ON_GPU:
        return None
    zero = "zero_optimization.offload_optimizer"
    halves = [f"{half}.{half}_master_weights_and_grads" for half in ("fp16", "bf16")]
    for key, usual in (
        *((key, False) for key in halves),
        (f"{zero}.super_offload", False),
        ("zero_force_ds_cpu_optimizer", False),
        (f"{PARAMS}.fp32_optimizer_states", None),
        (f"{zero}.ratio", 1),
    ):
        value = findings.stated(key)
        if value not in (None, usual):
            return f"{key}={shown(value)}"
    return "NVMe offload" if offload == "nvme" else None


def _equal(written: Any, value: Any) -> bool:
    """Compare values; JSON may have 1 for 1.0."""
    if isinstance(value, float) and isinstance(written, (int, float)):
        return math.isclose(written, value, rel_tol=1e-12)  # a rate may be a product
    return bool(written == value)
