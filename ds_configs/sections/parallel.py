"""The Layout from the `parallel` section of our JSON and the recipe's `parallel` and `batch`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeGuard

from ds_configs.findings import Findings
from ds_configs.known_keys import lookup
from ds_configs.sections import transformers_modules
from recipes.layout import Layout, divisors, share_batch
from recipes.problems import Problem, Setting, Text, Words, counted, either
from recipes.schema import Recipe

Config = dict[str, Any]
_RECIPE_KEY = {"tensor": "tp", "pipeline": "pp"}
_BATCH_KEYS = {  # of the JSON -> of the recipe
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "train_batch_size": "batch.global",
}


class _Degree(NamedTuple):
    """A degree of tensor or pipeline parallelism; `origin` names the JSON if it comes from there."""

    key: str
    value: int
    origin: str = ""

    @property
    def words(self) -> tuple[Words, ...]:
        return Setting(self.key, self.value), self.origin


def layout(
    recipe: Recipe, config: Config, world: int | None, stage: int | None, findings: Findings
) -> Layout | None:
    """Lay out `world` processes (None: the number that the degrees need); None with problems reported."""
    before = len(findings.problems)
    tp = _degree("tensor", recipe, config, findings)
    pp = _degree("pipeline", recipe, config, findings)
    agreed = _check_batch(recipe, config, findings)
    if tp is None or pp is None:
        return None
    _check_model(recipe, tp, pp, stage, findings)
    _check_sequence(recipe, config, tp, findings)
    if world is None:
        world = tp.value * pp.value * (recipe.parallel.dp or 1)
    dp = _data_parallel(recipe, config, tp, pp, world, agreed, findings)
    if dp is None or not agreed:
        return None
    stated, unit, total = _stated_shares(recipe, config), recipe.batch.unit, recipe.batch.global_
    least = stated == (None, None) and unit % dp == 0  # a ramp's smallest step decides the micro-batch
    shares = share_batch(*stated, unit if least else total, dp, pp.value)
    if isinstance(shares, Problem):
        findings.problems.append(shares)
    elif unit % (taken := shares[0] * dp):
        came = Setting("batch.micro", shares[0]), f" x dp={dp} with steps of multiples of {unit} samples"
        rule = "every step takes whole micro-batches on every data-parallel rank"
        fix = f"set batch.rampup.start and batch.rampup.increment to multiples of {taken}"
        micro = f", or batch.micro to {math.gcd(shares[0], unit // dp)}" * (unit % dp == 0)
        findings.problems.append(Problem("batch.rampup", came, rule, fix + micro))
    elif len(findings.problems) == before:
        return Layout(tp.value, pp.value, dp, shares[0], total // taken, total)
    return None


def _degree(name: str, recipe: Recipe, config: Config, findings: Findings) -> _Degree | None:
    """Return a degree: the recipe's if it states one, else the JSON's.

    "auto" takes the recipe's; `default_tensor` and `default_pipeline` stand in if the recipe states none, so
    that 3d.json gives a layout to recipes without one and leaves published ones theirs.
    """
    key = f"parallel.{_RECIPE_KEY[name]}"
    stated: int | None = getattr(recipe.parallel, _RECIPE_KEY[name])
    written_key, default_key = f"parallel.{name}", f"parallel.default_{name}"
    value, default = lookup(config, written_key), lookup(config, default_key)
    for written, field, rule in ((value, written_key, ', or "auto"'), (default, default_key, "")):
        if not (written is None or _is_degree(written) or (written == "auto" and rule)):
            rule = f"must be a whole number from 1{rule}"
            findings.refuse(field, f"{field}={written!r}", rule, "write one")
            return None
    if value in (None, "auto"):
        if stated is None and default is not None:
            return _Degree(key, default, f" (default_{name} of {findings.where})")
        return _Degree(key, stated or 1)
    if default is not None:
        came = f"{default_key}={default} next to {written_key}={value}"
        findings.refuse(default_key, came, 'a default is used with "auto" only', "remove one of the two")
    if stated is not None and value != stated:
        findings.disagreement(written_key, value, Setting(key, stated))
        return None
    return _Degree(key, value, f" ({findings.where})")


def _is_degree(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_model(recipe: Recipe, tp: _Degree, pp: _Degree, stage: int | None, findings: Findings) -> None:
    heads, layers, problems = recipe.model.heads, recipe.model.layers, findings.problems
    for degree in (tp, pp):
        transformers_modules.check_degree(recipe, Setting(degree.key, degree.value), degree.origin, findings)
    if heads % tp.value:
        rule = "each tensor-parallel rank takes heads/tp heads"
        fix = f"set parallel.tp to {either(divisors(heads))}"
        came: Text = Setting("model.heads", heads), " is not divisible by ", *tp.words
        problems.append(Problem(tp.key, came, rule, fix))
    if pp.value > layers:
        came = *pp.words, " is more than ", Setting("model.layers", layers)
        fix = f"set parallel.pp to {layers} or less"
        problems.append(Problem(pp.key, came, "each pipeline stage holds at least one layer", fix))
    came = *pp.words, f" with zero_optimization.stage={stage} ({findings.where})"
    stage_1 = "use stage 1 (--ds_config pipeline or 3d)"
    if pp.value > 1 and stage in (2, 3):
        rule = "DeepSpeed's pipeline keeps all micro-batches' gradients, which ZeRO-2 and ZeRO-3 shard away"
        problems.append(Problem(pp.key, came, rule, f"{stage_1}, or --set parallel.pp=1"))
    if pp.value > 1 and stage == 0:
        rule = "DeepSpeed counts the tied embedding once per stage there, and clips gradients by a wrong norm"
        problems.append(Problem(pp.key, came, rule, stage_1))
    if recipe.parallel.torch_ddp and (stage != 0 or recipe.model.implementation == "transformers"):
        came = Setting("parallel.torch_ddp", "true"), f" with stage {stage} ({findings.where})"
        rule = "torch's DistributedDataParallel averages our models' whole gradients, as stage 0 keeps them"
        fix = "use --ds_config zero0, or --set parallel.torch_ddp=false"
        problems.append(Problem("parallel.torch_ddp", came, rule, fix))


def _check_sequence(recipe: Recipe, config: Config, tp: _Degree, findings: Findings) -> None:
    if not recipe.parallel.sequence:
        return
    key, length = "parallel.sequence", recipe.sequence_length
    off, on = "--set parallel.sequence=false", Setting("parallel.sequence", "true")
    if tp.value == 1:
        came: Text = on, " with ", *tp.words
        rule, fix = "it shares positions out over tensor-parallel ranks", f"--set parallel.tp=2, or {off}"
        findings.problems.append(Problem(key, came, rule, fix))
    if length % tp.value:
        came = on, ": ", Setting("sequence_length", length), " is not divisible by ", *tp.words
        fix = f"set sequence_length to {length // tp.value * tp.value or tp.value}, or {off}"
        findings.problems.append(Problem(key, came, "each tensor rank takes as many positions", fix))
    for name in ("pipe_partitioned", "grad_partitioned"):
        if lookup(config, f"pipeline.{name}") is True:
            came = f"pipeline.{name}=true with ", on
            rule = "a tensor rank sends its own positions, and no part of what all of them have"
            findings.problems.append(Problem(f"pipeline.{name}", came, rule, f"remove the key, or {off}"))


def sends(recipe: Recipe) -> dict[str, Any]:
    """Return DeepSpeed's keys for sending activations and gradients between pipeline stages.

    Without sequence parallelism each tensor rank sends 1/tp of them (DeepSpeed's default).
    """
    if not recipe.parallel.sequence:
        return {}
    return {"pipeline.pipe_partitioned": False, "pipeline.grad_partitioned": False}


def _data_parallel(
    recipe: Recipe, config: Config, tp: _Degree, pp: _Degree, world: int, agreed: bool, findings: Findings
) -> int | None:
    """Return dp, or None with the problem reported. `agreed`: JSON and recipe have the same batch."""
    dp, shared = recipe.parallel.dp, tp.value * pp.value
    started, degrees = f"{counted(world, 'process')} started", (*tp.words, " x ", *pp.words)
    if dp is not None and shared * dp != world:
        fix, fitting = f"start {shared * dp} (deepspeed --num_gpus {shared * dp} …)", world // shared
        batch = _batch_for(recipe, config, fitting, pp.value) if agreed and world % shared == 0 else None
        if batch is not None:
            taking = f"--set parallel.dp=null{batch} to take what is started"
            fix = f"{fix}, or --set parallel.dp={fitting}{batch}, or {taking}"
        came = *degrees, " x ", Setting("parallel.dp", dp), f" = {shared * dp}, but {started}"
        findings.problems.append(Problem("parallel.dp", came, "tp x pp x dp = processes", fix))
        return None
    if world % shared:
        came = f"{started}, with ", *degrees, f" = {shared}"
        start = f"start {shared} (deepspeed --num_gpus {shared} …) or a multiple of {shared}"
        fix = f"{start}, or lower a degree with --set parallel.tp= or --set parallel.pp="
        rule = "the number of processes is a multiple of tp x pp"
        findings.problems.append(Problem("parallel.tp", came, rule, fix))
        return None
    return world // shared


def _batch_for(recipe: Recipe, config: Config, dp: int, pp: int) -> str | None:
    """Return flags that fit the batch to another dp, with the same samples per step if dp divides them.

    None if a value of the JSON prevents it.
    """
    micro, accumulation = _stated_shares(recipe, config)
    free = {key for written, key in _BATCH_KEYS.items() if config.get(written) in (None, "auto")}
    for without in ((), ("batch.accumulation",), ("batch.micro",), ("batch.micro", "batch.accumulation")):
        kept_micro = None if "batch.micro" in without else micro
        kept_accumulation = None if "batch.accumulation" in without else accumulation
        shares = share_batch(kept_micro, kept_accumulation, recipe.batch.global_, dp, pp)
        fits = not isinstance(shares, Problem) and recipe.batch.unit % (shares[0] * dp) == 0
        if free.issuperset(without) and fits:
            return "".join(f" --set {key}=null" for key in without)
    fixed = recipe.batch.rampup or "batch.global" not in free
    if fixed or (accumulation and "batch.accumulation" not in free):
        return None
    step = (micro or 1) * dp
    opened = " --set batch.accumulation=null" if accumulation else ""
    return f"{opened} --set batch.global={max(1, round(recipe.batch.global_ / step)) * step}"


def _check_batch(recipe: Recipe, config: Config, findings: Findings) -> bool:
    """Check that the JSON and the recipe agree on the batch."""
    before, batch = len(findings.problems), recipe.batch
    own = (batch.micro, batch.accumulation, batch.global_)
    for (key, recipe_key), stated in zip(_BATCH_KEYS.items(), own, strict=True):
        value = config.get(key)
        if value in (None, "auto"):
            continue
        if not _is_degree(value):
            findings.refuse(key, f"{key}={value!r}", "must be a whole number from 1", 'set it to "auto"')
        elif stated is not None and value != stated:
            findings.disagreement(key, value, Setting(recipe_key, stated))
    return len(findings.problems) == before


def _stated_shares(recipe: Recipe, config: Config) -> tuple[int | None, int | None]:
    """Return (micro, accumulation) of recipe or JSON, None if neither states one."""
    micro, accumulation, _ = (None if (value := config.get(key)) == "auto" else value for key in _BATCH_KEYS)
    return recipe.batch.micro or micro, recipe.batch.accumulation or accumulation
