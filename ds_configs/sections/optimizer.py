"""The `optimizer` section and clipping: "auto" from the recipe, no disagreement, no op without a compiler."""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Findings
from ds_configs.known_keys import lookup, shown, stated
from ds_configs.plan import Machine, Offload
from recipes.problems import Setting, Text
from recipes.schema import Recipe

# The recipe's name -> DeepSpeed's names (adam is AdamW unless adam_w_mode is false), and their spelling.
_TYPES = {"adamw": ("adamw", "adam"), "lamb": ("lamb",), "lion": ("lion",)}
_WRITTEN = {"adamw": "AdamW", "lamb": "Lamb", "lion": "Lion"}
_ON_GPU = ("none", "parameters")  # where the accelerator steps the optimizer
_WITHOUT = "remove the key: torch's AdamW steps as fast"


def check(recipe: Recipe, config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    """Refuse another optimizer and other numbers than the recipe's."""
    key = "optimizer.type"
    kind = lookup(config, key)
    name = recipe.optimizer.name
    if name != "adamw":
        _check_ours(recipe, config, stage, findings)
    elif kind not in (None, "auto") and str(kind).lower() not in _TYPES[name]:
        rule = f"the recipe's optimizer.name is {name}, and another rule of descent is another recipe"
        findings.refuse(key, f"{key}={kind}", rule, f'write "{_WRITTEN[name]}"')
    key = "optimizer.params.adam_w_mode"
    if lookup(config, key) is False:
        rule = "adds the decay to the gradient, while the recipe's adamw decays weights apart from it"
        findings.refuse(key, f"{key}=false", rule, "remove the key")
    for key, setting in _numbers(recipe).items():
        written = lookup(config, key)
        if written not in (None, "auto") and not _equal(written, setting.value):
            findings.disagreement(key, written, setting)


def _check_ours(recipe: Recipe, config: dict[str, Any], stage: int | None, findings: Findings) -> None:
    """Refuse Adam's keys beside LAMB and Lion, and LAMB except on whole parameters, under ZeRO-0."""
    name = recipe.optimizer.name
    setting, written = Setting("optimizer.name", name), _WRITTEN[name]
    if name == "lamb" and stage != 0:
        came: Text = (setting, f" with zero_optimization.stage={stage}")
        rule = "LAMB scales a step by the norm of a whole parameter, and ZeRO shards them in flat pieces"
        findings.refuse("optimizer.name", came, rule, "--ds_config zero0, or set optimizer.name to adamw")
        return
    if recipe.model.implementation == "transformers":
        came = (setting, " with ", Setting("model.implementation", "transformers"))
        rule, fix = "its Trainer steps AdamW", "set optimizer.name to adamw"
        findings.refuse("optimizer.name", came, rule, fix)
    kind = lookup(config, key := "optimizer.type")
    if kind not in (None, "auto") and str(kind).lower() != name:
        rule = f"the recipe's optimizer.name is {name}, and another rule of descent is another recipe"
        findings.refuse(key, f"{key}={kind}", rule, f'write "auto" or "{written}"')
    for key in ("torch_adam", "adam_w_mode", "fused", "foreach", "fp32_optimizer_states", "bias_correction"):
        if lookup(config, dotted := f"optimizer.params.{key}") is not None:
            findings.refuse(dotted, dotted, f"is a key of Adam's, not of {written}'s", "remove the key")
    scale = lookup(config, key := "fp16.loss_scale")
    if name == "lamb" and isinstance(scale, int | float) and scale != 0:
        rule = "DeepSpeed runs LAMB with a loss scale that moves, and with no fixed one"
        findings.refuse(
            key, f"{key}={scale}", rule, "write 0, and the first scale as fp16.initial_scale_power"
        )


def fills(
    recipe: Recipe, config: dict[str, Any], offload: Offload, machine: Machine, findings: Findings
) -> dict[str, Any]:
    """Return values by dotted key: the recipe's numbers, and the choice of AdamW.

    The choice is torch's fused kernel, which compiles nothing and resumes exactly; on a CPU it is as fast as
    DeepSpeed's compiled CPU Adam. DeepSpeed's Adam steps only if DeepSpeed or the JSON demands it.
    """
    values: dict[str, Any] = {key: setting.value for key, setting in _numbers(recipe).items()}
    values["optimizer.type"] = _WRITTEN[recipe.optimizer.name]
    if recipe.optimizer.name == "lion":
        asked = _asks_for_deepspeeds(config, offload)
        if config.get("zero_allow_untested_optimizer") is False:
            asked = "zero_allow_untested_optimizer=false"
        if asked:
            came: Text = Setting("optimizer.name", "lion"), f" with {asked}"
            fix = "remove that, or set optimizer.name to adamw"
            findings.refuse("optimizer.name", came, "our own Lion steps", fix)
        values |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if recipe.optimizer.name != "adamw":
        return values
    key, asked = "optimizer.params.torch_adam", _asks_for_deepspeeds(config, offload)
    written = stated(config, key)
    torch_adam = asked is None if written is None else written is True
    if not torch_adam and (missing := _missing(machine, offload)):
        came = f"{key}=false" if asked is None else asked
        rule = "DeepSpeed's Adam is compiled at first use"
        findings.refuse(key, f"{came}, but {missing} is missing", rule, f"install it, or {_WITHOUT}")
    values[key] = torch_adam
    if torch_adam and not stated(config, "optimizer.params.foreach"):
        values["optimizer.params.fused"] = True
    _check_states(config, torch_adam, offload not in _ON_GPU, findings)
    if torch_adam and offload not in _ON_GPU:
        key = "zero_force_ds_cpu_optimizer"
        if config.get(key) is True:
            came, rule = f"{key}=true with torch's AdamW", "demands DeepSpeed's compiled CPU Adam"
            findings.refuse(key, came, rule, "remove the key, or torch_adam")
        values[key] = False
    return values


def _asks_for_deepspeeds(config: dict[str, Any], offload: Offload) -> str | None:
    """Return the setting that demands DeepSpeed's own compiled CPU Adam, or None."""
    if offload in _ON_GPU:
        return None
    halves = [f"{half}.{half}_master_weights_and_grads" for half in ("fp16", "bf16")]
    for key in (*halves, "zero_optimization.offload_optimizer.super_offload", "zero_force_ds_cpu_optimizer"):
        if stated(config, key):
            return f"{key}=true"
    key = "optimizer.params.fp32_optimizer_states"
    if (states := stated(config, key)) is not None:
        return f"{key}={shown(states)}"
    key = "zero_optimization.offload_optimizer.ratio"
    if (ratio := stated(config, key)) not in (None, 1):
        return f"{key}={ratio}"
    return "NVMe offload" if offload == "nvme" else None


def _missing(machine: Machine, offload: Offload) -> str | None:
    """Return the missing compiler of DeepSpeed's Adam, or None."""
    if not machine.compiler:
        return "a C++ compiler (g++, ninja, Python's headers)"
    return "nvcc (the CUDA toolkit)" if offload in _ON_GPU and not machine.cuda_compiler else None


def _check_states(config: dict[str, Any], torch_adam: bool, offloads: bool, findings: Findings) -> None:
    """Refuse keys of the other Adam."""
    key = "optimizer.params.bias_correction"
    if lookup(config, key) is not None and torch_adam:
        findings.refuse(key, key, "torch's AdamW, which has it, takes no such key", "remove the key")
    key = "optimizer.params.fp32_optimizer_states"
    if lookup(config, key) is not None and (torch_adam or not offloads):
        rule = "is read by DeepSpeed's CPU Adam alone, which steps an offloaded optimizer"
        findings.refuse(key, key, rule, "remove the key, or offload the optimizer without torch_adam")
    for key in (names := ("optimizer.params.foreach", "optimizer.params.fused")):
        if lookup(config, key) is not None and not torch_adam:
            fix = "remove the key, or set torch_adam to true"
            findings.refuse(key, key, "is read by torch's AdamW alone", fix)
    if all(stated(config, key) for key in names):
        came, rule = f"{' and '.join(names)} are both true", "they are two forms of one step"
        findings.refuse(names[1], came, rule, "remove foreach: fused is the faster one")


def _numbers(recipe: Recipe) -> dict[str, Setting]:
    """Map keys of the JSON to the recipe's settings."""
    numbers = recipe.optimizer.model_dump(mode="json", exclude={"name", "clip"})
    settings = {f"optimizer.params.{key}": Setting(f"optimizer.{key}", numbers[key]) for key in numbers}
    return settings | {"gradient_clipping": Setting("optimizer.clip", recipe.optimizer.clip)}


def _equal(written: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(written, list) and [*map(_number, written)] == value
    return bool(_number(written) == value)


def _number(written: Any) -> Any:
    """Turn a whole number into a float, as JSON may have 1 for 1.0."""
    return float(written) if isinstance(written, int) and not isinstance(written, bool) else written
