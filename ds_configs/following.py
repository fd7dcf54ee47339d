"""What a DeepSpeed JSON states of a recipe: batch, optimizer, clipping, schedule, precision.

A JSON is held against these values (`sections/`), or a recipe takes them (`pretrain.py --follow`), with
DeepSpeed's defaults for what such a JSON leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_configs.findings import Notice, lookup, plain, stated
from recipes.schema import DEEPSPEED_SCHEDULES, Recipe

PARAMS = "optimizer.params"
# DeepSpeed's, in lower case -> the recipe's
TYPES = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb"}
BATCH = {  # of the JSON -> of the recipe
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "train_batch_size": "batch.global",
}
_OPTIMIZER = {
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
}
OF_MUON = ("momentum", "adam_lr", "adjust_lr")
_OF_LAMB = {"min_coeff": 0.01, "max_coeff": 10.0}
_SCHEDULE = "scheduler.params"
_OF_OTHERS = (
    "power",
    "wsd_decay_steps",
    "wsd_decay_style",
    "warmup_type",
    "warmup_min_lr",
)


@dataclass(frozen=True)
class Stated:
    """A value of the recipe by a JSON.

    Attributes:
        key: of the recipe, dotted.
        value: as plain data.
        source: the JSON's key.
        by_default: the JSON leaves the key out, and this is what DeepSpeed does then.
    """

    key: str
    value: Any
    source: str
    by_default: bool = False


def numbers(config: Mapping[str, Any], recipe: Recipe) -> Iterator[Stated]:
    """Yield what a checked JSON states of optimizer, clipping and schedule, and what follows by default.

    `recipe`: gives the rate of which an "auto" leaves shares.
    """
    kind = stated(config, "optimizer.type")
    name = TYPES.get(str(kind).lower())
    rate = stated(config, f"{PARAMS}.lr")
    decides = name is not None and rate is not None
    schedule = list(_schedule(config, rate or recipe.optimizer.lr))
    if name:
        yield Stated("optimizer.name", name, "optimizer.type")
    usual = _OPTIMIZER | (_OF_LAMB if name == "lamb" else {})
    if recipe.optimizer.name == "muon":
        usual = usual | dict.fromkeys(OF_MUON)
    if stated(config, f"{PARAMS}.torch_adam"):
        usual["weight_decay"] = 0.01  # torch's default
    if rate is not None and not any(each.key == "optimizer.lr" for each in schedule):
        yield Stated("optimizer.lr", rate, f"{PARAMS}.lr")
    for key, default in usual.items():
        source = f"{PARAMS}.{key}"
        value = lookup(config, source)
        if value is None and decides:
            yield Stated(f"optimizer.{key}", default, source, by_default=True)
        elif value not in (None, "auto"):
            yield Stated(f"optimizer.{key}", value, source)
    yield from _clipping(config, decides)
    yield from schedule
    if decides and not lookup(config, "scheduler"):
        constant = {
            "kind": "constant",
            "warmup_steps": 0,
            "min_lr": 0.0,
            **dict.fromkeys(_OF_OTHERS),
        }
        for key, value in constant.items():
            yield Stated(f"schedule.{key}", value, "scheduler", by_default=True)


def _clipping(config: Mapping[str, Any], decides: bool) -> Iterator[Stated]:
    """Yield the clipping; `decides`: what the JSON leaves out follows by default."""
    clip = lookup(config, "gradient_clipping")
    if clip is not None and clip != "auto":
        yield Stated("optimizer.clip", clip, "gradient_clipping")
    elif clip is None and decides:
        yield Stated("optimizer.clip", 0.0, "gradient_clipping", by_default=True)


def _schedule(config: Mapping[str, Any], peak: float) -> Iterator[Stated]:
    """Yield the schedule of the section `scheduler`, nothing where all of it is "auto"; `peak`: the rate."""
    kind = stated(config, "scheduler.type")
    params = lookup(config, _SCHEDULE) or {}
    if kind not in DEEPSPEED_SCHEDULES or (
        params and all(value == "auto" for value in params.values())
    ):
        return
    values: dict[str, tuple[str, Any]] = {
        "schedule.warmup_steps": ("warmup_num_steps", 1000),
        "schedule.warmup_type": ("warmup_type", "log"),
    }
    if kind == "WarmupCosineLR":
        values["schedule.warmup_min_lr"] = ("warmup_min_ratio", 0.0)
        values["schedule.min_lr"] = ("cos_min_ratio", 0.0001)
    else:
        values["schedule.min_lr"] = ("warmup_min_lr", 0.0)
        values["optimizer.lr"] = (
            "warmup_max_lr",
            0.001 if kind == "WarmupDecayLR" else None,
        )
    if kind != "WarmupLR":
        values["schedule.decay_steps"] = ("total_num_steps", None)
    yield Stated("schedule.kind", kind, "scheduler.type")
    yield Stated("schedule.counts", "steps", "scheduler.type")
    for key, (theirs, default) in values.items():
        value = params.get(theirs, default)
        if value is not None and value != "auto":
            value = value * peak if theirs.endswith("_ratio") else value
            yield Stated(
                key, value, f"{_SCHEDULE}.{theirs}", by_default=theirs not in params
            )
    for name in _OF_OTHERS:
        key = f"schedule.{name}"
        if key not in values:
            yield Stated(key, None, "scheduler.type")


def lowest_rate(recipe: Recipe, peak: float) -> float:
    """Return schedule.min_lr of a recipe with another peak: its own, or its share of a peak below that."""
    lowest = recipe.schedule.min_lr
    return (
        lowest
        if lowest <= peak
        else float(f"{peak * lowest / recipe.optimizer.lr:.6g}")
    )


def follow(
    config: Mapping[str, Any], recipe: Recipe, world: int | None
) -> list[Stated]:
    """Return all that a recipe takes from a checked JSON.

    Args:
        recipe: without the JSON, for its degrees of parallelism, and for what the JSON leaves to it.
        world: processes; None: as many as the JSON's batch needs.
    """
    found = list(numbers(config, recipe))
    taken = {each.key: each.value for each in found}
    peak = taken.get("optimizer.lr")
    if peak is not None and "schedule.min_lr" not in taken:
        found.append(
            Stated(
                "schedule.min_lr",
                lowest_rate(recipe, peak),
                "scheduler",
                by_default=True,
            )
        )
    switches = {half: lookup(config, f"{half}.enabled") for half in ("fp16", "bf16")}
    on = [half for half, switch in switches.items() if switch is True]
    if on:
        found.append(Stated("precision", on[0], f"{on[0]}.enabled"))
    elif "auto" not in switches.values():
        off = [half for half, value in switches.items() if value is False]
        source = f"{off[0]}.enabled" if off else "fp16"
        found.append(Stated("precision", "fp32", source, by_default=not off))
    return [*found, *_batch(config, recipe, world)]


def _batch(
    config: Mapping[str, Any], recipe: Recipe, world: int | None
) -> Iterator[Stated]:
    """Yield the batch as DeepSpeed completes it: without accumulation it is 1, or what the others leave."""
    micro, accumulation, total = (stated(config, key) for key in BATCH)
    if micro is None and accumulation is None and total is None:
        return
    dp = _data_parallel(config, recipe, world)
    if dp is None:
        dp = recipe.parallel.dp or 1
        if micro and accumulation and total and total % (micro * accumulation) == 0:
            dp = total // (micro * accumulation)
            yield Stated("parallel.dp", dp, "train_batch_size")
    left_open = "auto" in (
        lookup(config, "train_batch_size"),
        lookup(config, "gradient_accumulation_steps"),
    )
    fits = micro is not None and recipe.batch.global_ % (micro * dp) == 0
    if micro and total is None and (accumulation or not (left_open and fits)):
        accumulation = accumulation or 1
        yield Stated(
            "batch.global", micro * accumulation * dp, "train_micro_batch_size_per_gpu"
        )
    elif total is not None:
        yield Stated("batch.global", total, "train_batch_size")
        accumulation = accumulation or (1 if micro is None and not left_open else None)
    values = {
        "batch.micro": micro,
        "batch.accumulation": accumulation,
        "batch.rampup": None,
    }
    for key, source in zip(values, BATCH, strict=True):
        yield Stated(
            key, values[key], source, by_default=lookup(config, source) is None
        )


def _data_parallel(
    config: Mapping[str, Any], recipe: Recipe, world: int | None
) -> int | None:
    """Return the data-parallel ranks of `world` processes; None: any number may be started."""
    degrees = 1
    for theirs, own in (
        ("tensor", recipe.parallel.tp),
        ("pipeline", recipe.parallel.pp),
    ):
        degrees *= (
            own
            or stated(config, f"parallel.{theirs}")
            or lookup(config, f"parallel.default_{theirs}")
            or 1
        )
    return None if world is None else max(1, world // degrees)


def notices(
    taken: Sequence[Stated], before: Recipe, now: Recipe, where: str
) -> Iterator[Notice]:
    """Yield a notice of every value that the recipe `now` has from the JSON `where`, and `before` had not."""
    old = before.model_dump(mode="json", by_alias=True)
    new = now.model_dump(mode="json", by_alias=True)
    for each in taken:
        was = lookup(old, each.key)
        if was != lookup(new, each.key) == each.value:
            source = f"{where}: {each.source}"
            if each.by_default:
                source = f"{where} has no {each.source}: DeepSpeed's default"
            yield Notice(
                "follow",
                f"follow: {each.key}={plain(each.value)}, was {plain(was)} ({source})",
            )
