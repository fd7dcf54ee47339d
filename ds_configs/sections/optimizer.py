"""The `optimizer` section and clipping: "auto" from the recipe, disagreement refused, ops that need a compiler avoided."""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Report
from ds_configs.known_keys import lookup
from ds_configs.plan import Machine
from recipes.schema import Recipe

_TYPES = ("adam", "adamw")  # DeepSpeed runs both as AdamW unless adam_w_mode is false


def check(recipe: Recipe, config: dict[str, Any], report: Report) -> None:
    """Refuse another optimizer than the recipe's, and numbers that are not the recipe's."""
    kind = lookup(config, "optimizer.type")
    if kind not in (None, "auto") and str(kind).lower() not in _TYPES:
        report.problem(
            f"{report.where}: optimizer.type={kind}: the recipe's optimizer.name is {recipe.optimizer.name}, and another rule of "
            'descent is another recipe; write "AdamW"'
        )
    if lookup(config, "optimizer.params.adam_w_mode") is False:
        report.problem(
            f"{report.where}: optimizer.params.adam_w_mode=false: adds the decay to the gradient, while the recipe's "
            "optimizer.name=adamw decays weights apart from it; remove the key"
        )
    for key, recipe_key, value in _numbers(recipe):
        written = lookup(config, key)
        if written not in (None, "auto") and not _equal(written, value):
            report.disagreement(key, written, recipe_key, value)


def fills(
    recipe: Recipe, config: dict[str, Any], offloads: bool, machine: Machine, report: Report
) -> dict[str, Any]:
    """Values by dotted key: the recipe's numbers, and the way round compiled ops on a machine without a compiler."""
    values: dict[str, Any] = {key: value for key, _, value in _numbers(recipe)}
    values["optimizer.type"] = "AdamW"
    torch_adam = lookup(config, "optimizer.params.torch_adam")
    if torch_adam is None and machine.accelerator == "cpu" and not offloads:
        # DeepSpeed's fused Adam is a GPU kernel. Its CPU form compiles for half a minute and accumulates its
        # bias correction in a way that a resumed run cannot repeat (launch/checkpoints/checkpoint.py).
        torch_adam = True
    if torch_adam is None and machine.compiler and not machine.cuda_compiler and not offloads:
        report.notice(
            "optimizer: torch's AdamW, since DeepSpeed's fused Adam needs nvcc (the CUDA toolkit), which is missing; same rule, slower"
        )
        torch_adam = True
    if not machine.compiler:
        if torch_adam is False:
            report.problem(
                f"{report.where}: optimizer.params.torch_adam=false, but there is no compiler: DeepSpeed's Adam is compiled at first "
                "use; install g++, ninja and Python's headers, or remove the key"
            )
        elif torch_adam is not True:
            report.notice(
                "optimizer: torch's AdamW, since DeepSpeed's needs g++, ninja and Python's headers, which are missing; same rule, slower"
            )
        torch_adam = True
    values["optimizer.params.torch_adam"] = torch_adam is True
    if torch_adam is True and offloads:
        if config.get("zero_force_ds_cpu_optimizer") is True:
            report.problem(
                f"{report.where}: zero_force_ds_cpu_optimizer=true with torch's AdamW: demands DeepSpeed's compiled CPU Adam; "
                "remove the key, or install g++ and ninja and remove torch_adam"
            )
        values["zero_force_ds_cpu_optimizer"] = False
    return values


def _numbers(recipe: Recipe) -> tuple[tuple[str, str, Any], ...]:
    """(key of the JSON, key of the recipe, the recipe's value)."""
    optimizer = recipe.optimizer
    return (
        ("optimizer.params.lr", "optimizer.lr", optimizer.lr),
        ("optimizer.params.betas", "optimizer.betas", list(optimizer.betas)),
        ("optimizer.params.eps", "optimizer.eps", optimizer.eps),
        ("optimizer.params.weight_decay", "optimizer.weight_decay", optimizer.weight_decay),
        ("gradient_clipping", "optimizer.clip", optimizer.clip),
    )


def _equal(written: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(written, list) and [*map(_number, written)] == value
    return _number(written) == value


def _number(written: Any) -> Any:
    """JSON has 1 for 1.0; anything else is compared as it is."""
    return float(written) if isinstance(written, int) and not isinstance(written, bool) else written
