"""The `optimizer` section and clipping: "auto" from the recipe, no disagreement, no op without a compiler."""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Findings
from ds_configs.known_keys import lookup
from ds_configs.plan import Machine
from recipes.problems import Setting
from recipes.schema import Recipe

_TYPES = ("adam", "adamw")  # DeepSpeed runs both as AdamW unless adam_w_mode is false


def check(recipe: Recipe, config: dict[str, Any], findings: Findings) -> None:
    """Refuse another optimizer than the recipe's, and numbers that are not the recipe's."""
    key = "optimizer.type"
    kind = lookup(config, key)
    if kind not in (None, "auto") and str(kind).lower() not in _TYPES:
        ours = f"the recipe's optimizer.name is {recipe.optimizer.name}"
        rule = f"{ours}, and another rule of descent is another recipe"
        findings.refuse(key, f"{key}={kind}", rule, 'write "AdamW"')
    key = "optimizer.params.adam_w_mode"
    if lookup(config, key) is False:
        rule = "adds the decay to the gradient, while the recipe's adamw decays weights apart from it"
        findings.refuse(key, f"{key}=false", rule, "remove the key")
    for key, stated in _numbers(recipe).items():
        written = lookup(config, key)
        if written not in (None, "auto") and not _equal(written, stated.value):
            findings.disagreement(key, written, stated)


def fills(
    recipe: Recipe, config: dict[str, Any], offloads: bool, machine: Machine, findings: Findings
) -> dict[str, Any]:
    """Values by dotted key: the recipe's numbers, and torch's Adam where DeepSpeed's cannot be compiled."""
    values: dict[str, Any] = {key: stated.value for key, stated in _numbers(recipe).items()}
    values["optimizer.type"] = "AdamW"
    key = "optimizer.params.torch_adam"
    torch_adam = None if (written := lookup(config, key)) == "auto" else written
    if torch_adam is None and machine.accelerator == "cpu" and not offloads:
        # DeepSpeed's fused Adam is a GPU kernel. Its CPU form compiles for half a minute and accumulates its
        # bias correction (launch/deepspeed_fixes/cpu_adam_bias_correction.py).
        torch_adam = True
    missing = None
    if not machine.compiler:
        missing = "DeepSpeed's needs g++, ninja and Python's headers, which are missing"
    elif not machine.cuda_compiler and not offloads:
        missing = "DeepSpeed's fused Adam needs nvcc (the CUDA toolkit), which is missing"
    if torch_adam is False and not machine.compiler:
        rule = "DeepSpeed's Adam is compiled at first use"
        fix = "install g++, ninja and Python's headers, or remove the key"
        findings.refuse(key, f"{key}=false, but there is no compiler", rule, fix)
    elif torch_adam is None and missing:
        findings.notice("optimizer", f"torch's AdamW, since {missing}; same rule, slower")
        torch_adam = True
    values[key] = torch_adam is True
    _check_states(config, torch_adam is True, offloads, findings)
    if torch_adam is True and offloads:
        key = "zero_force_ds_cpu_optimizer"
        if config.get(key) is True:
            came, rule = f"{key}=true with torch's AdamW", "demands DeepSpeed's compiled CPU Adam"
            fix = "remove the key, or install g++ and ninja and remove torch_adam"
            findings.refuse(key, came, rule, fix)
        values[key] = False
    return values


def _check_states(config: dict[str, Any], torch_adam: bool, offloads: bool, findings: Findings) -> None:
    """Refuse what only the other Adam understands."""
    key = "optimizer.params.bias_correction"
    if lookup(config, key) is not None and torch_adam:
        findings.refuse(key, key, "torch's AdamW, which has it, takes no such key", "remove the key")
    key = "optimizer.params.fp32_optimizer_states"
    if lookup(config, key) is not None and (torch_adam or not offloads):
        rule = "is read by DeepSpeed's CPU Adam alone, which steps an offloaded optimizer"
        findings.refuse(key, key, rule, "remove the key, or offload the optimizer without torch_adam")
    key = "optimizer.params.foreach"
    if lookup(config, key) is not None and not torch_adam:
        fix = "remove the key, or set torch_adam to true"
        findings.refuse(key, key, "is read by torch's AdamW alone", fix)


def _numbers(recipe: Recipe) -> dict[str, Setting]:
    """Key of the JSON -> what the recipe has for it."""
    numbers = recipe.optimizer.model_dump(mode="json", exclude={"name", "clip"})
    stated = {f"optimizer.params.{key}": Setting(f"optimizer.{key}", numbers[key]) for key in numbers}
    return stated | {"gradient_clipping": Setting("optimizer.clip", recipe.optimizer.clip)}


def _equal(written: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(written, list) and [*map(_number, written)] == value
    return bool(_number(written) == value)


def _number(written: Any) -> Any:
    """JSON has 1 for 1.0; anything else is compared as it is."""
    return float(written) if isinstance(written, int) and not isinstance(written, bool) else written
