"""The Plan of a recipe, a DeepSpeed JSON, a number of processes and a machine, or all reasons against it.

    machine = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
    plan = resolve(recipe, "zero3_offload", world=2, machine=machine)
    deepspeed.initialize(..., config=plan.ds)

Here stand the values of "auto" for sizes, too: buckets, gathered parameters, the first loss scale. Runs before
any process group starts and imports neither torch nor deepspeed.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_configs import following, known_keys
from ds_configs.findings import (
    FOLDER,
    Config,
    ConfigError,
    Findings,
    find,
    lookup,
    put,
    read,
    stated,
)
from ds_configs.following import Stated
from ds_configs.plan import Machine, Plan, Precision
from ds_configs.sections import monitors, optimizer, parallel, recomputation, zero
from ds_configs.sections.precision import precision
from ds_configs.sections.recomputation import PARTITION, partitions
from recipes.layout import Layout
from recipes.schema import Recipe

# DeepSpeed gives "auto" a meaning of its own here.
_OWN_AUTO = ("data_types.keep_in_fp32_modules",)
# sections in which it stands for the default
_DROPS_AUTO = ("zero_optimization.", "fp16.", "bf16.")
# Elements of a bucket large enough that latency hardly counts in a GPU's collective.
_BUCKET = 50_000_000
# Bits by which the first loss scale exceeds 1, for one micro-batch.
_FIRST_SCALE = 16
# Number of ranks from which a sum in bf16 is off by half a percent or more.
_MANY_RANKS = 16


def resolve(
    recipe: Recipe,
    ds_path: str | Path,
    world: int | None,
    machine: Machine,
    environ: Mapping[str, str] = os.environ,
) -> Plan:
    """Fill the "auto" values of a ds_config from the recipe and check that it can run.

    Args:
        recipe: valid in itself.
        ds_path: a JSON file, or the bare name of one of ds_configs/.
        world: processes, over all machines; None: the number that the layout needs.
        machine: what the accelerator and the system offer.
        environ: for MEGARECIPES_NVME; by default the process's environment.

    Raises ConfigError: all problems, one line each: what came, the rule, the fix.
    """
    assert world is None or world >= 1, world
    path = find(ds_path)
    ours = path.resolve().parent == FOLDER
    where = str(path)
    if ours:
        where = f"ds_configs/{path.name}"
    findings = Findings(where, read(path))
    known_keys.check(findings)
    stage = zero.stage(findings)
    chosen = precision(recipe, stage, machine, findings)
    layout = parallel.layout(recipe, world, stage, findings)
    offload = zero.offload(stage, machine, findings)
    zero.check_rest(stage, layout, findings)
    optimizer.check(recipe, stage, offload, findings)
    recomputation.check(recipe, layout, machine, findings)
    monitors.check(layout, machine, findings)
    values = optimizer.fills(recipe, offload, machine, findings)
    if offload == "nvme":
        values |= zero.nvme_paths(environ, findings)
    if recipe.parallel.sequence:  # else each tensor rank sends 1/tp of the activations
        values |= dict.fromkeys(parallel.SENDS_PARTS, False)
    # A refused layout is replaced by another, so that it leaves no "auto" open.
    shared = layout or Layout(tp=1, pp=1, dp=1, micro=1, accumulation=1, global_batch=1)
    values |= {
        "train_batch_size": shared.global_batch,
        "train_micro_batch_size_per_gpu": shared.micro,
        "gradient_accumulation_steps": shared.accumulation,
    }
    open_values = sizes(recipe, shared, machine, stage) | sums(
        findings.config, chosen, shared
    )
    ds = _filled(findings.config, values, open_values)
    for section in ("parallel", "scheduler"):
        ds.pop(section, None)
    for half in ("fp16", "bf16"):
        ds.setdefault(half, {})["enabled"] = chosen == half
    for key in list(_autos(ds)):
        if key.startswith(_DROPS_AUTO) and not key.endswith("nvme_path"):
            section, _, last = key.rpartition(".")
            lookup(ds, section).pop(last)
            findings.notice(key, '"auto" is DeepSpeed\'s default')
        elif key not in _OWN_AUTO and not key.endswith("nvme_path"):
            findings.refuse(
                key,
                "nothing fills it here",
                "write a value; without the key it is DeepSpeed's default",
                f'{key}="auto"',
            )
    if findings.problems:
        raise ConfigError(findings.problems)
    assert layout is not None and chosen is not None and stage is not None
    vocab = recipe.model.embedding_rows(layout.tp)
    return Plan(
        recipe,
        layout,
        ds,
        stage,
        offload,
        chosen,
        vocab,
        tuple(findings.notices),
        path.stem,
    )


def tensor_degree(recipe: Recipe, ds_path: str | Path) -> int:
    """Return the tensor-parallel degree that recipe or JSON state, 1 without one; `resolve` checks it.

    Raises ConfigError: there is no such JSON, or it cannot be read.
    """
    return following.degree(read(find(ds_path)), "tensor", recipe.parallel.tp)


def followed(recipe: Recipe, ds_path: str | Path, world: int | None) -> list[Stated]:
    """Return the values that `recipe` takes from a JSON of one's own; `world`: as `following.follow` has it.

    Raises ConfigError: it cannot be read, or what it states is no value. The rest is left to `resolve`.
    """
    path = find(ds_path, "--follow")
    findings = Findings(str(path), read(path))
    known_keys.check(findings)
    optimizer.check_schedule(findings.stated("scheduler.type"), recipe, findings)
    if findings.problems:
        raise ConfigError(findings.problems)
    return following.follow(findings.config, recipe, world)


def _filled(config: Config, values: Config, autos: Config) -> dict[str, Any]:
    """Copy `config`; `values` replace "auto" and absent keys, `autos` replace "auto" alone."""
    filled = copy.deepcopy(dict(config))
    for key, value in {**values, **autos}.items():
        written = lookup(filled, key)
        if written == "auto" or (written is None and key in values):
            put(filled, key, value)
    return filled


def _autos(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys with the value "auto"."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _autos(below, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _autos(below, f"{prefix}[{index}]")
    elif value == "auto":
        yield prefix


def sizes(
    recipe: Recipe, layout: Layout, machine: Machine, stage: int | None
) -> dict[str, Any]:
    """Return the values of "auto", by dotted key; sizes in elements.

    A bucket holds hidden^2 elements, at least 5e7, and at most a rank's parameters. Stage 2 frees gradients
    early, so its buckets hold the largest one: launch/deepspeed_fixes/freed_gradients.py says why. Stage 3
    keeps parameters below 10 hidden whole, as Hugging Face's integration does. It gathers the next layer,
    12 hidden^2 / tp, during the computation of one, and has room for three.
    """
    hidden = recipe.model.hidden
    tp = layout.tp
    layer = 12 * hidden * hidden // tp
    room = max(1_000_000_000, 3 * layer)
    embedding = recipe.model.embedding_rows(tp) // tp * hidden
    own = _parameters(recipe, layout, layer, embedding)
    # the embedding, or an MLP matrix
    largest = max(embedding, 4 * hidden * hidden // tp)
    bucket = min(max(hidden * hidden, _BUCKET), own + own % 2)
    reduced = max(bucket, largest) if stage == 2 else bucket
    return {
        "zero_optimization.reduce_bucket_size": reduced,
        "zero_optimization.allgather_bucket_size": bucket,
        "zero_optimization.stage3_prefetch_bucket_size": layer,
        "zero_optimization.stage3_max_live_parameters": room,
        "zero_optimization.stage3_max_reuse_distance": room,
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
        # A CPU computes nothing while it copies a bucket.
        "zero_optimization.overlap_comm": machine.device.asynchronous,
        PARTITION: partitions(recipe, layout, machine),
        # DeepSpeed saves nothing
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "zero_optimization.offload_param.buffer_size": largest,  # any one parameter
        # DeepSpeed divides a loss by the accumulation before it scales it.
        "fp16.initial_scale_power": min(
            32, _FIRST_SCALE + math.ceil(math.log2(layout.accumulation))
        ),
    }


def sums(config: Config, precision: Precision | None, layout: Layout) -> dict[str, Any]:
    """Return the data types for sums of gradients over micro-batches and over ranks.

    bf16 has 8 bits: a sum of 512 gradients is off by 2 %, or by half if they agree in sign, since it stops
    growing at 256 times an addend. fp16 has 11, and a loss scale. For sums in fp32 DeepSpeed's stage 1
    takes another optimizer, whose sums are scattered in fp32 for the bytes of an all-reduce in bf16.
    """
    own = precision or "fp32"
    short = own == "bf16" and not stated(config, "bf16.bf16_master_weights_and_grads")
    summed = short and layout.accumulation > 1
    scattered = (
        summed
        and stated(config, "zero_optimization.stage") == 1
        and stated(config, "zero_optimization.offload_optimizer.device")
        in (None, "none")
    )
    return {
        "data_types.grad_accum_dtype": "fp32" if summed else own,
        "communication_data_type": "fp32"
        if scattered or short and layout.dp >= _MANY_RANKS
        else own,
    }


def _parameters(recipe: Recipe, layout: Layout, layer: int, embedding: int) -> int:
    """Estimate the parameters of a rank of the largest pipeline stage."""
    model = recipe.model
    layers = model.different_layers(math.ceil(model.layers / layout.pp))
    positions = recipe.positions * model.hidden
    return layers * (layer + 13 * model.hidden) + embedding + positions
