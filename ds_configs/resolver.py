"""A recipe, a DeepSpeed JSON, a number of processes and a machine become a Plan, or every reason why they cannot.

    plan = resolve(recipe, "zero3_offload", world=2, machine=Machine("cpu", fp16=False, bf16=True, compiler=True, libaio=False))
    deepspeed.initialize(..., config=plan.ds)

Runs before any process group starts and imports neither torch nor deepspeed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_configs import known_keys
from ds_configs.findings import Report
from ds_configs.jsonfile import FOLDER, ConfigError, available, find, read
from ds_configs.plan import Machine, Plan
from ds_configs.sections import optimizer, parallel, transformers_modules, zero
from ds_configs.sections.precision import precision
from recipes.layout import Layout, padded_vocab
from recipes.schema import Recipe

__all__ = ["ConfigError", "Layout", "Machine", "Plan", "available", "padded_vocab", "resolve"]

_LEAST_BUCKET = (
    1_000_000  # elements; with smaller buckets a step of a small model is all latency of collectives
)
_OWN_AUTO = (
    "data_types.keep_in_fp32_modules",
    "pipeline.stages",
)  # DeepSpeed gives "auto" a meaning of its own here


def resolve(
    recipe: Recipe,
    ds_path: str | Path,
    world: int,
    machine: Machine,
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """Fill the "auto" values of a ds_config from the recipe and check that it can run.

    Args:
        recipe: valid in itself.
        ds_path: a JSON file, or the bare name of one of ds_configs/.
        world: processes, over all machines.
        machine: what the accelerator and the system offer.
        environ: for MEGARECIPES_NVME; by default the process's environment.

    Raises:
        ConfigError: all problems, one line each: what came, the rule, the fix.
    """
    assert world >= 1, world
    path = find(ds_path)
    config = read(path)
    report = Report(_display(path))
    report.problem(*known_keys.problems(config, report.where))
    stage = zero.stage(config, report)
    config = _without_broken_sections(config)
    chosen = precision(recipe, config, stage, machine, report)
    layout = parallel.layout(recipe, config, world, stage, report)
    offload = zero.offload(config, stage, machine, report)
    optimizer.check(recipe, config, report)
    transformers_modules.check(recipe, config, report)
    if config.get("gradient_allreduce_op", "mean") != "mean":
        report.problem(
            f"{report.where}: gradient_allreduce_op={config['gradient_allreduce_op']}: a step's gradient is the mean over its global "
            "batch, whatever dp is; remove the key"
        )
    values = optimizer.fills(recipe, config, offload != "none", machine, report)
    values |= zero.nvme_paths(config, os.environ if environ is None else environ, report)
    if layout is not None:
        values |= _batch_and_sizes(recipe, layout, machine)
    ds = _fill(config, values)
    ds.pop("parallel", None)
    for half in ("fp16", "bf16"):
        ds.setdefault(half, {})["enabled"] = chosen == half
    _report_leftovers(ds, values, layout is not None, report)
    if report.problems:
        raise ConfigError(report.problems)
    assert layout is not None and chosen is not None and stage is not None
    vocab = transformers_modules.embedding_rows(recipe, layout.tp)
    return Plan(recipe, layout, ds, stage, offload, chosen, vocab, tuple(report.notices), path.stem)


def _display(path: Path) -> str:
    """A short name for messages: ds_configs/zero3.json for ours, the path as given for the user's."""
    return f"ds_configs/{path.name}" if path.resolve().parent == FOLDER else str(path)


def _without_broken_sections(config: dict[str, Any]) -> dict[str, Any]:
    """A copy in which what should be a section and is not (already reported) is absent."""
    config = copy.deepcopy(config)
    for name in known_keys.SECTIONS:
        *above, last = name.split(".")
        parent = known_keys.lookup(config, above[0]) if above else config
        if isinstance(parent, dict) and not isinstance(parent.get(last, {}), dict):
            del parent[last]
    return config


def _batch_and_sizes(recipe: Recipe, layout: Layout, machine: Machine) -> dict[str, Any]:
    """What follows from the layout, and ZeRO's sizes as Hugging Face's integration fills them.

    Sizes are in elements. HF: reduce bucket hidden², prefetch 0.9 hidden², parameters below 10 hidden stay whole.
    """
    hidden = recipe.model.hidden
    bucket = max(hidden * hidden, _LEAST_BUCKET)
    embedding = transformers_modules.embedding_rows(recipe, layout.tp) // layout.tp * hidden
    return {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro,
        "gradient_accumulation_steps": layout.accumulation,
        "zero_optimization.reduce_bucket_size": bucket,
        "zero_optimization.allgather_bucket_size": bucket,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden,
        "zero_optimization.overlap_comm": machine.accelerator != "cpu",
        # A buffer holds any one parameter: the embedding, or an MLP matrix of 4 hidden² / tp.
        "zero_optimization.offload_param.buffer_size": max(embedding, 4 * hidden * hidden // layout.tp),
    }


# These are written whether or not the JSON mentions them; the rest only where it says "auto".
_ALWAYS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer.type", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
    "optimizer.params.weight_decay", "optimizer.params.torch_adam", "zero_force_ds_cpu_optimizer",
    "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path",
)  # fmt: skip


def _fill(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `config` with `values` put where it says "auto" or, for `_ALWAYS`, nothing."""
    filled = copy.deepcopy(config)
    for key, value in values.items():
        written = known_keys.lookup(filled, key)
        if written == "auto" or (written is None and key in _ALWAYS):
            *sections, last = key.split(".")
            section = filled
            for name in sections:
                section = section.setdefault(name, {})
            section[last] = value
    return filled


def _report_leftovers(ds: dict[str, Any], values: Mapping[str, Any], complete: bool, report: Report) -> None:
    """Refuse "auto" where nothing fills it; keys that a missing layout left open are not reported on top of its problems."""
    for key in _autos(ds):
        if key in _OWN_AUTO or key.endswith("nvme_path") or (not complete and key in _FROM_LAYOUT):
            continue
        report.problem(
            f'{report.where}: {key}="auto": nothing fills it here; write a value, or remove the key'
        )


_FROM_LAYOUT = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.overlap_comm", "zero_optimization.offload_param.buffer_size",
)  # fmt: skip


def _autos(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys that hold "auto"."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _autos(below, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _autos(below, f"{prefix}[{index}]")
    elif value == "auto":
        yield prefix
