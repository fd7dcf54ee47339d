"""The Layout from the `parallel` section of our JSON and the recipe's `parallel` and `batch`."""

from __future__ import annotations

import math
from typing import NamedTuple

from ds_configs.findings import Disagreement, Findings
from ds_configs.following import BATCH
from recipes.layout import Layout, divisors, share_batch
from recipes.problems import Problem, Setting, Text, Words, counted, either
from recipes.schema import Recipe

# True: each tensor rank sends a part of activations and gradients to the next pipeline stage.
SENDS_PARTS = ("pipeline.pipe_partitioned", "pipeline.grad_partitioned")
_RECIPE_KEY = {"tensor": "tp", "pipeline": "pp"}


class _Degree(NamedTuple):
    """A degree of tensor or pipeline parallelism; `origin` names the JSON if it comes from there."""

    key: str
    value: int
    origin: str = ""

    @property
    def words(self) -> tuple[Words, ...]:
        return Setting(self.key, self.value), self.origin


def layout(
    recipe: Recipe, world: int | None, stage: int | None, findings: Findings
) -> Layout | None:
    """Lay out `world` processes (None: the number that the degrees need); None with problems reported."""
    before = len(findings.problems)
    tp = _degree("tensor", recipe, findings)
    pp = _degree("pipeline", recipe, findings)
    if tp is None or pp is None:
        _check_batch(recipe, 1, 1, findings)
        return None
    least_dp = (
        max(1, world // (tp.value * pp.value)) if world else recipe.parallel.dp or 1
    )
    agreed = _check_batch(recipe, least_dp, pp.value, findings)
    _check_model(recipe, tp, pp, stage, findings)
    if recipe.parallel.sequence:
        _check_sequence(recipe, tp, findings)
    if world is None:
        world = tp.value * pp.value * (recipe.parallel.dp or 1)
    dp = _data_parallel(recipe, tp, pp, world, agreed, findings)
    if dp is None or not agreed:
        return None
    stated = _stated_shares(recipe, findings)
    unit = recipe.batch.unit
    total = recipe.batch.global_
    # a ramp's smallest step decides the micro-batch
    shared = total
    if stated == (None, None) and unit % dp == 0:
        shared = unit
    shares = share_batch(*stated, shared, dp, pp.value)
    if isinstance(shares, Problem):
        findings.problems.append(_within_json(shares, total, dp, recipe, findings))
    elif unit % (taken := shares[0] * dp):
        came = (
            Setting("batch.micro", shares[0]),
            f" x dp={dp} with steps of multiples of {unit} samples",
        )
        rule = "every step takes whole micro-batches on every data-parallel rank"
        fix = (
            f"set batch.rampup.start and batch.rampup.increment to multiples of {taken}"
        )
        micro = f", or batch.micro to {math.gcd(shares[0], unit // dp)}" * (
            unit % dp == 0
        )
        findings.problems.append(Problem("batch.rampup", came, rule, fix + micro))
    elif len(findings.problems) == before:
        return Layout(tp.value, pp.value, dp, shares[0], total // taken, total)
    return None


def _degree(name: str, recipe: Recipe, findings: Findings) -> _Degree | None:
    """Return a degree: the recipe's if it states one, else the JSON's.

    "auto" takes the recipe's; `default_tensor` and `default_pipeline` stand in if the recipe states none, so
    that 3d.json gives a layout to recipes without one and leaves published ones theirs.
    """
    key = f"parallel.{_RECIPE_KEY[name]}"
    own: int | None = getattr(recipe.parallel, _RECIPE_KEY[name])
    written_key = f"parallel.{name}"
    default_key = f"parallel.default_{name}"
    value = findings.stated(written_key)
    default = findings.stated(default_key)
    if value is None:
        if own is None and default is not None:
            return _Degree(key, default, f" (default_{name} of {findings.where})")
        return _Degree(key, own or 1)
    if default is not None:
        findings.refuse(
            default_key,
            'a default is used with "auto" only',
            "remove one of the two",
            beside=f" next to {written_key}={value}",
        )
    if own is not None and value != own:
        findings.disagreement(written_key, Setting(key, own))
        return None
    return _Degree(key, value, f" ({findings.where})")


def _check_model(
    recipe: Recipe, tp: _Degree, pp: _Degree, stage: int | None, findings: Findings
) -> None:
    heads = recipe.model.heads
    layers = recipe.model.layers
    problems = findings.problems
    for degree in (tp, pp):
        if recipe.model.implementation == "transformers" and degree.value > 1:
            came: Text = (
                *degree.words,
                " with ",
                Setting("model.implementation", "transformers"),
            )
            fix = "take another --ds_config (zero1, zero2, zero3)"
            if recipe.model.family == "gpt2":
                fix += ", or --set model.implementation=megarecipes"
            else:
                fix = f"set {degree.key} to 1; --ds_config zero3 cuts a model that is too large"
            problems.append(
                Problem(degree.key, came, "its modules are cut by ZeRO alone", fix)
            )
    if heads % tp.value:
        came = Setting("model.heads", heads), " is not divisible by ", *tp.words
        problems.append(
            Problem(
                tp.key,
                came,
                "each tensor-parallel rank takes heads/tp heads",
                f"set parallel.tp to {either(divisors(heads))}",
            )
        )
    if pp.value > layers:
        came = *pp.words, " is more than ", Setting("model.layers", layers)
        problems.append(
            Problem(
                pp.key,
                came,
                "each pipeline stage holds at least one layer",
                f"set parallel.pp to {layers} or less",
            )
        )
    if pp.value > 1 and stage in (0, 2, 3):
        came = *pp.words, f" with zero_optimization.stage={stage} ({findings.where})"
        rule = "DeepSpeed's pipeline keeps all micro-batches' gradients, which ZeRO-2 and ZeRO-3 shard away"
        if stage == 0:
            rule = "DeepSpeed counts the tied embedding once per stage there, and clips by a wrong norm"
        problems.append(
            Problem(
                pp.key,
                came,
                rule,
                "use stage 1 (--ds_config pipeline or 3d), or --set parallel.pp=1",
            )
        )
    if recipe.parallel.torch_ddp and (
        stage != 0 or recipe.model.implementation == "transformers"
    ):
        came = (
            Setting("parallel.torch_ddp", "true"),
            f" with stage {stage} ({findings.where})",
        )
        problems.append(
            Problem(
                "parallel.torch_ddp",
                came,
                "torch's DistributedDataParallel averages our models' whole gradients, as stage 0 keeps them",
                "use --ds_config zero0, or --set parallel.torch_ddp=false",
            )
        )


def _check_sequence(recipe: Recipe, tp: _Degree, findings: Findings) -> None:
    key = "parallel.sequence"
    length = recipe.sequence_length
    off = "--set parallel.sequence=false"
    on = Setting("parallel.sequence", "true")
    if tp.value == 1:
        came: Text = on, " with ", *tp.words
        findings.problems.append(
            Problem(
                key,
                came,
                "it shares positions out over tensor-parallel ranks",
                f"--set parallel.tp=2, or {off}",
            )
        )
    if length % tp.value:
        came = (
            on,
            ": ",
            Setting("sequence_length", length),
            " is not divisible by ",
            *tp.words,
        )
        findings.problems.append(
            Problem(
                key,
                came,
                "each tensor rank takes as many positions",
                f"set sequence_length to {length // tp.value * tp.value or tp.value}, or {off}",
            )
        )
    for name in SENDS_PARTS:
        if findings.stated(name):
            findings.refuse(
                name,
                "a tensor rank sends its own positions, and no part of what all of them have",
                f"remove the key, or {off}",
                (f"{name}=true with ", on),
            )


def _data_parallel(
    recipe: Recipe,
    tp: _Degree,
    pp: _Degree,
    world: int,
    agreed: bool,
    findings: Findings,
) -> int | None:
    """Return dp, or None with the problem reported. `agreed`: JSON and recipe have the same batch."""
    dp = recipe.parallel.dp
    shared = tp.value * pp.value
    started = f"{counted(world, 'process')} started"
    degrees = (*tp.words, " x ", *pp.words)
    came: Text
    if dp is not None and shared * dp != world:
        fix = f"start {shared * dp} (deepspeed --num_gpus {shared * dp} …)"
        fitting = world // shared
        batch = (
            _batch_for(recipe, findings, fitting, pp.value)
            if agreed and world % shared == 0
            else None
        )
        if batch is not None:
            taking = f"--set parallel.dp=null{batch} to take what is started"
            fix = f"{fix}, or --set parallel.dp={fitting}{batch}, or {taking}"
        came = (
            *degrees,
            " x ",
            Setting("parallel.dp", dp),
            f" = {shared * dp}, but {started}",
        )
        findings.problems.append(
            Problem("parallel.dp", came, "tp x pp x dp = processes", fix)
        )
        return None
    if world % shared:
        came = f"{started}, with ", *degrees, f" = {shared}"
        start = f"start {shared} (deepspeed --num_gpus {shared} …) or a multiple of {shared}"
        findings.problems.append(
            Problem(
                "parallel.tp",
                came,
                "the number of processes is a multiple of tp x pp",
                f"{start}, or lower a degree with --set parallel.tp= or --set parallel.pp=",
            )
        )
        return None
    return world // shared


def _batch_for(recipe: Recipe, findings: Findings, dp: int, pp: int) -> str | None:
    """Return flags that fit the batch to another dp, with the same samples per step if dp divides them.

    None if a value of the JSON prevents it.
    """
    micro, accumulation = _stated_shares(recipe, findings)
    free = {key for written, key in BATCH.items() if findings.stated(written) is None}
    for opened in (
        (),
        ("batch.accumulation",),
        ("batch.micro",),
        ("batch.micro", "batch.accumulation"),
    ):
        kept_micro = None if "batch.micro" in opened else micro
        kept_accumulation = None if "batch.accumulation" in opened else accumulation
        shares = share_batch(
            kept_micro, kept_accumulation, recipe.batch.global_, dp, pp
        )
        fits = (
            not isinstance(shares, Problem)
            and recipe.batch.unit % (shares[0] * dp) == 0
        )
        if free.issuperset(opened) and fits:
            return "".join(f" --set {key}=null" for key in opened)
    fixed = {"batch.global"} | ({"batch.accumulation"} if accumulation else set())
    if recipe.batch.rampup or not free.issuperset(fixed):
        return None
    step = (micro or 1) * dp
    number = max(1, round(recipe.batch.global_ / step)) * step
    opened_shares = " --set batch.accumulation=null" if accumulation else ""
    return f"{opened_shares} --set batch.global={number}"


def _check_batch(recipe: Recipe, dp: int, pp: int, findings: Findings) -> bool:
    """Check that the JSON and the recipe agree on the batch; a fix is offered if it makes one."""
    batch = recipe.batch
    own = (batch.micro, batch.accumulation, batch.global_)
    stated = list(map(findings.stated, BATCH))
    differing = list[tuple[str, Setting]]()
    for (key, recipe_key), theirs, ours in zip(BATCH.items(), stated, own, strict=True):
        if ours is not None and theirs not in (None, ours):
            differing.append((key, Setting(recipe_key, ours)))
    micro, accumulation, total = (
        theirs or ours for theirs, ours in zip(stated, own, strict=True)
    )
    assert total is not None
    fits = (
        not isinstance(share_batch(micro, accumulation, total, dp, pp), Problem)
        and not batch.rampup
    )
    for key, setting in differing:
        settings = [Setting(setting.key, findings.stated(key))] if fits else []
        findings.disagreement(key, setting, settings, _stated_keys(findings))
    return not differing


def _stated_keys(findings: Findings) -> str:
    """Name the keys of the batch that the JSON states."""
    *first, last = [key for key in BATCH if findings.stated(key) is not None]
    return f"{', '.join(first)} and {last}" if first else last


def _within_json(
    problem: Problem, total: int, dp: int, recipe: Recipe, findings: Findings
) -> Problem:
    """Return the problem of shares with a fix of the JSON, if the JSON states one of them."""
    micro, accumulation, stated_total = map(findings.stated, BATCH)
    if micro is accumulation is stated_total is None:
        return problem
    fixes = []
    per_rank, over = divmod(total, dp)
    if not over:
        for key, other in zip(BATCH, (accumulation, micro), strict=False):
            if other and findings.stated(key) and per_rank % other == 0:
                fixes.append(f"set {key} to {per_rank // other} in the JSON")
    taken = (micro or recipe.batch.micro or 0) * (
        accumulation or recipe.batch.accumulation or 0
    )
    if taken and total % taken == 0 and recipe.parallel.dp is None:
        ranks = total // taken
        fixes.append(f"start {ranks} data-parallel ranks")
    if not over:
        fixes.append(f'set {_stated_keys(findings)} to "auto"')
    fix = ", or ".join(fixes) or problem.fix
    return Disagreement(problem.key, problem.came, problem.rule, fix)


def _stated_shares(recipe: Recipe, findings: Findings) -> tuple[int | None, int | None]:
    """Return (micro, accumulation) of recipe or JSON, None if neither states one."""
    micro, accumulation, _ = map(findings.stated, BATCH)
    return recipe.batch.micro or micro, recipe.batch.accumulation or accumulation
