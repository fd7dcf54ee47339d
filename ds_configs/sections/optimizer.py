"""The `optimizer` section and clipping: "auto" from the recipe, no disagreement, no op without a compiler."""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Findings, shown
from ds_configs.plan import Machine, Offload
from recipes.problems import Setting, Text
from recipes.schema import Recipe

# The recipe's name -> DeepSpeed's names (adam is AdamW unless adam_w_mode is false), and their spelling.
_TYPES = {"adamw": ("adamw", "adam"), "lamb": ("lamb",)}
_WRITTEN = {"adamw": "AdamW", "lamb": "Lamb"}
_ON_GPU = ("none", "parameters")  # where the accelerator steps the optimizer
_PARAMS = "optimizer.params"
_OF_ADAM = ("torch_adam", "adam_w_mode", "fused", "foreach", "fp32_optimizer_states", "bias_correction")


def check(recipe: Recipe, stage: int | None, findings: Findings) -> None:
    """Refuse another optimizer and other numbers than the recipe's, and LAMB on sharded parameters."""
    name = recipe.optimizer.name
    key = "optimizer.type"
    setting = Setting("optimizer.name", name)
    written = _WRITTEN[name]
    for number, own in _numbers(recipe).items():
        value = findings.stated(number)
        if value is not None and not _equal(value, own.value):
            findings.disagreement(number, own)
    if name == "lamb" and stage != 0:
        came: Text = (setting, f" with zero_optimization.stage={stage}")
        rule = "LAMB scales a step by the norm of a whole parameter, and ZeRO shards them in flat pieces"
        fix = "--ds_config zero0, or set optimizer.name to adamw"
        findings.refuse(setting.key, rule, fix, came)
        return
    kind = findings.stated(key)
    if kind is not None and str(kind).lower() not in _TYPES[name]:
        rule = f"the recipe's optimizer.name is {name}, and another rule of descent is another recipe"
        findings.refuse(key, rule, f'write "auto" or "{written}"')
    if name == "adamw":
        return
    if recipe.model.implementation == "transformers":
        came = (setting, " with ", Setting("model.implementation", "transformers"))
        findings.refuse(setting.key, "its Trainer steps AdamW", "set optimizer.name to adamw", came)
    for key in (f"{_PARAMS}.{each}" for each in _OF_ADAM):
        if findings.lookup(key) is not None:
            findings.refuse(key, f"is a key of Adam's, not of {written}'s", "remove the key")
    if findings.stated("fp16.loss_scale"):
        rule = "DeepSpeed runs LAMB with a loss scale that moves, and with no fixed one"
        fix = "write 0, and the first scale as fp16.initial_scale_power"
        findings.refuse("fp16.loss_scale", rule, fix)


def fills(recipe: Recipe, offload: Offload, machine: Machine, findings: Findings) -> dict[str, Any]:
    """Return values by dotted key: the recipe's numbers, and the choice of AdamW.

    The choice is torch's fused kernel, which compiles nothing and resumes exactly; on a CPU it is as fast as
    DeepSpeed's compiled CPU Adam. DeepSpeed's Adam steps only if DeepSpeed or the JSON demands it.
    """
    values: dict[str, Any] = {key: setting.value for key, setting in _numbers(recipe).items()}
    values["optimizer.type"] = _WRITTEN[recipe.optimizer.name]
    if recipe.optimizer.name == "adamw":
        values |= _adamw(offload, machine, findings)
    return values


def _adamw(offload: Offload, machine: Machine, findings: Findings) -> dict[str, Any]:
    """Return the choice between torch's AdamW and DeepSpeed's; refuse keys of the other one."""
    key = f"{_PARAMS}.torch_adam"
    offloads = offload not in _ON_GPU
    asked = _asks_for_deepspeeds(findings, offload)
    written = findings.stated(key)
    torch_adam = asked is None if written is None else written is True
    values = {key: torch_adam}
    missing = "nvcc (the CUDA toolkit)" if not (offloads or machine.cuda_compiler) else ""
    missing = missing if machine.compiler else "a C++ compiler (g++, ninja, Python's headers)"
    if missing and not torch_adam:
        fix = "install it, or remove the key: torch's AdamW steps as fast"
        rule = "DeepSpeed's Adam is compiled at first use"
        findings.refuse(key, rule, fix, f"{asked or f'{key}=false'}, but {missing} is missing")
    foreach, fused = both = f"{_PARAMS}.foreach", f"{_PARAMS}.fused"
    if torch_adam and not findings.stated(foreach):
        values[fused] = True
    if all(findings.stated(key) for key in both):
        came = f"{foreach} and {fused} are both true"
        findings.refuse(
            fused, "they are two forms of one step", "remove foreach: fused is the faster one", came
        )
    of_torch = "is read by torch's AdamW alone", "remove the key, or set torch_adam to true"
    states = (
        "is read by DeepSpeed's CPU Adam alone, which steps an offloaded optimizer",
        "remove the key, or offload the optimizer without torch_adam",
    )
    own = "torch's AdamW, which has it, takes no such key", "remove the key"
    for key, wrong, (rule, fix) in (
        (f"{_PARAMS}.bias_correction", torch_adam, own),
        (f"{_PARAMS}.fp32_optimizer_states", torch_adam or not offloads, states),
        (foreach, not torch_adam, of_torch),
        (fused, not torch_adam, of_torch),
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
        *((key, (None, False)) for key in (*halves, f"{zero}.super_offload", "zero_force_ds_cpu_optimizer")),
        (f"{_PARAMS}.fp32_optimizer_states", (None,)),
        (f"{zero}.ratio", (None, 1)),
    ):
        if findings.stated(key) not in usual:
            return f"{key}={shown(findings.stated(key))}"
    return "NVMe offload" if offload == "nvme" else None


def _numbers(recipe: Recipe) -> dict[str, Setting]:
    """Map keys of the JSON to the recipe's settings."""
    numbers = recipe.optimizer.model_dump(mode="json", exclude={"name", "clip"})
    settings = {f"{_PARAMS}.{key}": Setting(f"optimizer.{key}", numbers[key]) for key in numbers}
    return settings | {"gradient_clipping": Setting("optimizer.clip", recipe.optimizer.clip)}


def _equal(written: Any, value: Any) -> bool:
    """Compare, where JSON may have 1 for 1.0, but not true."""
    if isinstance(value, list) and isinstance(written, list):
        return [*map(_number, written)] == value
    return bool(_number(written) == value)


def _number(written: Any) -> Any:
    if isinstance(written, bool):  # which Python takes for 1 and 0
        return None
    return float(written) if isinstance(written, int) else written
