"""What a DeepSpeed JSON states of a recipe: batch, optimizer, clipping, schedule, precision.

A JSON is held against these values (`sections/`), or a recipe takes them (`pretrain.py --follow`), with
DeepSpeed's defaults for what such a JSON leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ds_configs.findings import Config, Notice, lookup, plain, stated
from ds_configs.plan import Plan
from recipes.key_paths import flatten
from recipes.layout import share_batch
from recipes.problems import Problem
from recipes.schema import Recipe

PARAMS = "optimizer.params"
# DeepSpeed's, in lower case -> the recipe's
TYPES = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb"}
BATCH = {  # of the JSON -> of the recipe
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "train_batch_size": "batch.global",
}
OPTIMIZER = {
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "bias_correction": True,
}
# what DeepSpeed does without the key
CLIP = 1.0
RATE = 1e-3
OF_MUON = ("momentum", "adam_lr", "adjust_lr")
OF_LAMB = {"min_coeff": 0.01, "max_coeff": 10.0}
_SCHEDULE = "scheduler.params"
_WARMUP = {
    "warmup_num_steps": ("schedule.warmup_steps", 1000),
    "warmup_type": ("schedule.warmup_type", "log"),
}
_RATES = {"warmup_min_lr": ("schedule.min_lr", 0.0), **_WARMUP}
END = "total_num_steps"
IDLE = "without effect"
_END = {END: ("schedule.decay_steps", None)}
# DeepSpeed's schedules: the parameters of each, the recipe's key, the default (None: the optimizer's, or none)
SCHEDULES: dict[str, dict[str, tuple[str, Any]]] = {
    "WarmupLR": {**_RATES, "warmup_max_lr": ("optimizer.lr", None)},
    "WarmupDecayLR": {**_RATES, **_END, "warmup_max_lr": ("optimizer.lr", 0.001)},
    "WarmupCosineLR": {
        **_WARMUP,
        **_END,
        "warmup_min_ratio": ("schedule.warmup_min_lr", 0.0),
        "cos_min_ratio": ("schedule.min_lr", 0.0001),
    },
}
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
        left_open: the JSON leaves the value to the recipe.
    """

    key: str
    value: Any
    source: str
    by_default: bool = False
    left_open: bool = False


def numbers(config: Config, recipe: Recipe) -> Iterator[Stated]:
    """Yield what a checked JSON states of optimizer, clipping and schedule, and what follows by default.

    `recipe`: gives the rate of which an "auto" leaves shares.
    """
    unscheduled = is_open(config)
    for each in _numbers(config, recipe):
        scheduled = each.source.startswith("scheduler.")
        if not (each.left_open or (unscheduled and scheduled)):
            yield each


def _numbers(config: Config, recipe: Recipe) -> Iterator[Stated]:
    """Yield `numbers`, and those that the JSON leaves to the recipe."""
    kind = stated(config, "optimizer.type")
    name = TYPES.get(str(kind).lower())
    rate = lookup(config, f"{PARAMS}.lr")
    by_default = name is not None and rate is None
    rate = RATE if by_default else stated(config, f"{PARAMS}.lr")
    schedule = list(_schedule(config, recipe, rate or recipe.optimizer.lr))
    if name:
        yield Stated("optimizer.name", name, "optimizer.type")
    usual = OPTIMIZER | (OF_LAMB if name == "lamb" else {})
    if recipe.optimizer.name == "muon":
        usual = usual | dict.fromkeys(OF_MUON)
    if stated(config, f"{PARAMS}.torch_adam"):
        usual["weight_decay"] = 0.01  # torch's default
    scheduled = {each.key for each in schedule if not each.left_open}
    if rate is not None and "optimizer.lr" not in scheduled:
        yield Stated("optimizer.lr", rate, f"{PARAMS}.lr", by_default)
    for key, default in usual.items():
        source = f"{PARAMS}.{key}"
        value = lookup(config, source)
        if value is None and name:
            yield Stated(f"optimizer.{key}", default, source, by_default=True)
        elif value not in (None, "auto"):
            yield Stated(f"optimizer.{key}", value, source)
    yield _clipping(config, recipe, name)
    yield from schedule
    if not lookup(config, "scheduler"):
        yield from _unscheduled(recipe, constant=bool(name and rate is not None))


def _unscheduled(recipe: Recipe, constant: bool) -> Iterator[Stated]:
    """Yield the schedule of a JSON without one; `constant`: it has a rate."""
    key = "schedule.kind"
    if not constant:
        yield Stated(key, recipe.schedule.kind, "scheduler", left_open=True)
        return
    values = {key: "constant", "schedule.warmup_steps": 0, "schedule.min_lr": 0.0}
    values |= {f"schedule.{name}": None for name in _OF_OTHERS}
    for key, value in values.items():
        yield Stated(key, value, "scheduler", by_default=True)


def _clipping(config: Config, recipe: Recipe, name: str | None) -> Stated:
    """Return the clipping; `name`: the JSON's optimizer."""
    source = "gradient_clipping"
    clip = lookup(config, source)
    if clip is None and name:
        return Stated("optimizer.clip", CLIP, source, by_default=True)
    if clip in (None, "auto"):
        return Stated("optimizer.clip", recipe.optimizer.clip, source, left_open=True)
    return Stated("optimizer.clip", clip, source)


def is_open(config: Config) -> bool:
    """Check if the section `scheduler` states a type alone: all its numbers are "auto"."""
    params = lookup(config, _SCHEDULE) or {}
    return bool(params) and all(value == "auto" for value in params.values())


def _schedule(config: Config, recipe: Recipe, peak: float) -> Iterator[Stated]:
    """Yield the schedule of the section `scheduler`; `peak`: the rate."""
    kind = stated(config, "scheduler.type")
    if kind not in SCHEDULES:
        return
    params = lookup(config, _SCHEDULE) or {}
    yield Stated("schedule.kind", kind, "scheduler.type")
    yield Stated("schedule.counts", "steps", "scheduler.type")
    taken = set[str]()
    for theirs, (key, default) in SCHEDULES[kind].items():
        taken.add(key)
        source = f"{_SCHEDULE}.{theirs}"
        value = params.get(theirs, default)
        if value == "auto":
            value = _left_open(recipe, kind, key, peak)
            value = default if value is None else value
            yield Stated(key, value, source, left_open=True)
        elif value is not None:
            value = value * peak if theirs.endswith("_ratio") else value
            yield Stated(key, value, source, by_default=theirs not in params)
    for name in _OF_OTHERS:
        key = f"schedule.{name}"
        if key not in taken:
            yield Stated(key, None, "scheduler.type")


def _left_open(recipe: Recipe, kind: str, key: str, peak: float) -> Any:
    """Return the recipe's value for an "auto"; where it begins lower than it ends, its warm-up begins at 0."""
    if key == "optimizer.lr":
        return peak
    if key == "schedule.min_lr":
        begins_there = kind != "WarmupCosineLR" and recipe.schedule.kind != kind
        return 0.0 if begins_there else lowest_rate(recipe, peak)
    return getattr(recipe.schedule, key.partition(".")[2])


def lowest_rate(recipe: Recipe, peak: float) -> float:
    """Return schedule.min_lr of a recipe with another peak: its own, or its share of a peak below that."""
    lowest = recipe.schedule.min_lr
    return (
        lowest
        if lowest <= peak
        else float(f"{peak * lowest / recipe.optimizer.lr:.6g}")
    )


def follow(config: Config, recipe: Recipe, world: int | None) -> list[Stated]:
    """Return all that a recipe takes from a checked JSON.

    Args:
        recipe: without the JSON, for its degrees of parallelism, and for what the JSON leaves to it.
        world: processes; None: as many as the JSON's batch needs.
    """
    found = list(_numbers(config, recipe))
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


def _batch(config: Config, recipe: Recipe, world: int | None) -> Iterator[Stated]:
    """Yield the batch as DeepSpeed completes it: without accumulation it is 1, or what the others leave."""
    micro, accumulation, total = (stated(config, key) for key in BATCH)
    if micro is None and accumulation is None and total is None:
        return
    batch = recipe.batch
    tp = degree(config, "tensor", recipe.parallel.tp)
    pp = degree(config, "pipeline", recipe.parallel.pp)
    if world is not None:
        dp = max(1, world // (tp * pp))
    else:
        dp = recipe.parallel.dp or 1
        if micro and accumulation and total and total % (micro * accumulation) == 0:
            dp = total // (micro * accumulation)
            yield Stated("parallel.dp", dp, "train_batch_size")
    alone = micro is None and total is None
    if alone:
        # as the recipe has it on so many ranks
        shares = share_batch(batch.micro, batch.accumulation, batch.global_, dp, pp)
        micro = batch.micro if isinstance(shares, Problem) else shares[0]
    left_open = "auto" in (
        lookup(config, "train_batch_size"),
        lookup(config, "gradient_accumulation_steps"),
    )
    fits = micro is not None and batch.global_ % (micro * dp) == 0
    if micro and total is None and (accumulation or not (left_open and fits)):
        source = "gradient_accumulation_steps"
        source = source if alone else "train_micro_batch_size_per_gpu"
        accumulation = accumulation or 1
        yield Stated("batch.global", micro * accumulation * dp, source)
    elif total is not None:
        yield Stated("batch.global", total, "train_batch_size")
        accumulation = accumulation or (1 if micro is None and not left_open else None)
    values = {
        "batch.micro": micro,
        "batch.accumulation": accumulation,
        "batch.rampup": None,
    }
    for key, source in zip(values, BATCH, strict=True):
        of_recipe = alone and key == "batch.micro"
        absent = lookup(config, source) is None and not of_recipe
        yield Stated(key, values[key], source, absent, of_recipe)


def degree(config: Config, theirs: str, own: int | None) -> int:
    """Return a degree of parallelism: the recipe's `own`, else the JSON's."""
    written = stated(config, f"parallel.{theirs}")
    return own or written or stated(config, f"parallel.default_{theirs}") or 1


def notices(
    taken: Sequence[Stated], before: Recipe, plan: Plan, where: str, written: Config
) -> Iterator[Notice]:
    """Yield notices of all values of a JSON, but those with a notice in the plan.

    Args:
        taken: what the plan's recipe has of it.
        before: the recipe without it.
        plan: as it is resolved.
        where: name of the JSON.
        written: the JSON as it stands.
    """
    told = {notice.key for notice in plan.notices}
    old = before.as_data()
    new = plan.recipe.as_data()
    for each in taken:
        was = lookup(old, each.key)
        differs = was != each.value
        if lookup(new, each.key) == each.value and (differs or each.left_open):
            told.add(each.source)
            source = f"{where}: {each.source}"
            if each.by_default:
                source = f"{where} has no {each.source}: DeepSpeed's default"
            if each.left_open:
                source = f"{where} leaves {each.source} to the recipe"
            value = f"{plain(each.value)}{f', was {plain(was)}' * differs}"
            yield Notice("follow", f"follow: {each.key}={value} ({source})", differs)
    unchanged = {each.source for each in taken}
    found: dict[str, list[str]] = {}
    for key, value in flatten(written):
        passed = lookup(plan.ds, key)
        if key in told or key.startswith(("parallel.", "bfloat16.")):
            continue
        what = IDLE
        word = key
        if key in unchanged:
            what = "as the recipe has it"
            word = f"{key}={plain(value)}"
        elif passed is not None and value in (passed, "auto"):
            what = "passed on to DeepSpeed"
            word = f"{key}={plain(passed)}"
        found.setdefault(what, []).append(word)
    for what, words in found.items():
        yield Notice("follow", f"follow: {what}: {', '.join(words)}", what == IDLE)
