"""The `parallel` section of our JSON and the recipe's `parallel` and `batch` become a Layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ds_configs.findings import Report, join
from ds_configs.known_keys import lookup
from ds_configs.sections import transformers_modules
from recipes.layout import Layout, divisors, share_batch
from recipes.schema import Recipe

_Numbers = tuple[int | None, int | None]  # micro, accumulation
_RECIPE_KEY = {"tensor": "tp", "pipeline": "pp"}


@dataclass(frozen=True)
class _Degree:
    """A degree, and how to name it in a message, with the JSON where it comes from there."""

    value: int
    text: str


def layout(
    recipe: Recipe, config: dict[str, Any], world: int, stage: int | None, report: Report
) -> Layout | None:
    """The layout of `world` processes, or None with its problems reported."""
    before = len(report.problems)
    tp = _degree("tensor", recipe, config, report)
    pp = _degree("pipeline", recipe, config, report)
    numbers = _batch(recipe, config, report)
    if tp is None or pp is None:
        return None
    _check_model(recipe, tp, pp, stage, report)
    dp = _data_parallel(
        recipe,
        tp,
        pp,
        world,
        report,
        lambda dp: numbers and _batch_for(recipe, config, numbers, dp, pp.value),
    )
    if dp is None or numbers is None:
        return None
    micro, accumulation = numbers
    shares = share_batch(micro, accumulation, recipe.batch.global_, dp, pp.value)
    if isinstance(shares, str):
        report.problem(shares)
        return None
    if len(report.problems) > before:
        return None
    return Layout(tp.value, pp.value, dp, *shares, recipe.batch.global_)


def _degree(name: str, recipe: Recipe, config: dict[str, Any], report: Report) -> _Degree | None:
    """A degree: the recipe's where it states one, else the JSON's.

    "auto" takes the recipe's; `default_tensor` and `default_pipeline` stand in where the recipe states none, so that 3d.json
    gives a layout to recipes that have none and leaves the published ones theirs.
    """
    key = _RECIPE_KEY[name]
    stated: int | None = getattr(recipe.parallel, key)
    value = lookup(config, f"parallel.{name}")
    default = lookup(config, f"parallel.default_{name}")
    for written, field, rule in ((value, name, ', or "auto"'), (default, f"default_{name}", "")):
        if not (written is None or _is_degree(written) or (written == "auto" and rule)):
            report.problem(
                f"{report.where}: parallel.{field}={written!r}: must be a whole number from 1{rule}; write one"
            )
            return None
    if value in (None, "auto"):
        if stated is not None or default is None:
            return _Degree(stated or 1, f"parallel.{key}={stated or 1}")
        return _Degree(default, f"parallel.{key}={default} (default_{name} of {report.where})")
    if default is not None:
        report.problem(
            f"{report.where}: parallel.default_{name}={default} beside parallel.{name}={value}: a default is used with "
            f'"auto" only; remove one of the two'
        )
    if stated is not None and value != stated:
        report.disagreement(f"parallel.{name}", value, f"parallel.{key}", stated)
        return None
    return _Degree(value, f"parallel.{key}={value} ({report.where})")


def _is_degree(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_model(recipe: Recipe, tp: _Degree, pp: _Degree, stage: int | None, report: Report) -> None:
    heads, layers = recipe.model.heads, recipe.model.layers
    for degree in (tp, pp):
        transformers_modules.check_degree(recipe, degree.text, degree.value, report)
    if heads % tp.value:
        report.problem(
            f"model.heads={heads} is not divisible by {tp.text}: each tensor-parallel rank takes heads/tp heads; set "
            f"parallel.tp to {join(divisors(heads))}"
        )
    if pp.value > layers:
        report.problem(
            f"{pp.text} is more than model.layers={layers}: each pipeline stage holds at least one layer; set parallel.pp "
            f"to {layers} or less"
        )
    if pp.value > 1 and stage in (2, 3):
        report.problem(
            f"{pp.text} with zero_optimization.stage={stage} ({report.where}): DeepSpeed's pipeline keeps the gradients of "
            "all micro-batches, which ZeRO-2 and ZeRO-3 shard away; use stage 1 (--ds_config pipeline or 3d), or "
            "--set parallel.pp=1"
        )
    if pp.value > 1 and stage == 0:
        report.problem(
            f"{pp.text} with zero_optimization.stage=0 ({report.where}): DeepSpeed counts the tied embedding once per stage "
            "there, so that gradients are clipped by a wrong norm; use stage 1 (--ds_config pipeline or 3d)"
        )


def _data_parallel(
    recipe: Recipe,
    tp: _Degree,
    pp: _Degree,
    world: int,
    report: Report,
    batch_for: Callable[[int], str | None],
) -> int | None:
    """dp, or None with the problem reported; `batch_for`: what another dp asks of the batch, None where it cannot be had."""
    dp, shared = recipe.parallel.dp, tp.value * pp.value
    if dp is not None and shared * dp != world:
        fix = f"start {shared * dp} (deepspeed --num_gpus {shared * dp} …)"
        if world % shared == 0 and (batch := batch_for(world // shared)) is not None:
            fix += f", or --set parallel.dp={world // shared}{batch}, or --set parallel.dp=null{batch} to take what is started"
        report.problem(
            f"{tp.text} x {pp.text} x parallel.dp={dp} = {shared * dp}, but {world} process{_es(world)} started: "
            f"tp x pp x dp = processes; {fix}"
        )
        return None
    if world % shared:
        report.problem(
            f"{world} process{_es(world)} started, with {tp.text} x {pp.text} = {shared}: the number of processes is a multiple of "
            f"tp x pp; start {shared} (deepspeed --num_gpus {shared} …) or a multiple of {shared}, or lower a degree with "
            "--set parallel.tp= or --set parallel.pp="
        )
        return None
    return world // shared


def _batch_for(recipe: Recipe, config: dict[str, Any], numbers: _Numbers, dp: int, pp: int) -> str | None:
    """What to set of the batch beside another dp, so that the shares come out: the same samples a step where dp divides them.

    None where the JSON states what is in the way.
    """
    keys = {
        "train_micro_batch_size_per_gpu": "micro",
        "gradient_accumulation_steps": "accumulation",
        "train_batch_size": "global",
    }
    free = {key for written, key in keys.items() if config.get(written) in (None, "auto")}
    micro, accumulation = numbers
    free -= {key for key, number in (("micro", micro), ("accumulation", accumulation)) if number is None}
    for dropped in ((), ("accumulation",), ("micro",), ("micro", "accumulation")):
        if free.issuperset(dropped):
            kept = None if "micro" in dropped else micro, None if "accumulation" in dropped else accumulation
            if not isinstance(share_batch(*kept, recipe.batch.global_, dp, pp), str):
                return "".join(f" --set batch.{key}=null" for key in dropped)
    if "global" not in free or (accumulation and "accumulation" not in free):
        return None
    step = (micro or 1) * dp
    opened = " --set batch.accumulation=null" if accumulation else ""
    return f"{opened} --set batch.global={max(1, round(recipe.batch.global_ / step)) * step}"


def _es(world: int) -> str:
    return "" if world == 1 else "es"


def _batch(recipe: Recipe, config: dict[str, Any], report: Report) -> _Numbers | None:
    """(micro, accumulation) as stated by recipe or JSON, None where neither does."""
    batch = recipe.batch
    stated: list[int | None] = []
    agreed = True
    for key, recipe_key, recipe_value in (
        ("train_batch_size", "batch.global", batch.global_),
        ("train_micro_batch_size_per_gpu", "batch.micro", batch.micro),
        ("gradient_accumulation_steps", "batch.accumulation", batch.accumulation),
    ):
        value = config.get(key)
        if value in (None, "auto"):
            stated.append(recipe_value)
        elif not _is_degree(value):
            report.problem(
                f'{report.where}: {key}={value!r}: must be a whole number from 1; set it to "auto"'
            )
            agreed = False
        elif recipe_value is not None and value != recipe_value:
            report.disagreement(key, value, recipe_key, recipe_value)
            agreed = False
        else:
            stated.append(value)
    return (stated[1], stated[2]) if agreed else None
