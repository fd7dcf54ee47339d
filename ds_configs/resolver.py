"""The Plan of a recipe, a DeepSpeed JSON, a number of processes and a machine, or all reasons against it.

    machine = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
    plan = resolve(recipe, "zero3_offload", world=2, machine=machine)
    deepspeed.initialize(..., config=plan.ds)

Runs before any process group starts and imports neither torch nor deepspeed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ds_configs import following, known_keys
from ds_configs.findings import Findings, lookup
from ds_configs.following import Stated
from ds_configs.jsonfile import FOLDER, ConfigError, find, read
from ds_configs.plan import Machine, Plan
from ds_configs.sections import monitors, optimizer, parallel, recomputation, zero
from ds_configs.sections.precision import precision
from ds_configs.sections.sizes import sizes, sums
from recipes.layout import Layout
from recipes.schema import Recipe

# DeepSpeed gives "auto" a meaning of its own here.
_OWN_AUTO = ("data_types.keep_in_fp32_modules", "pipeline.stages")


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
    findings = Findings(f"ds_configs/{path.name}" if ours else str(path), read(path))
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
    values |= zero.nvme_paths(environ, findings) | parallel.sends(recipe)
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
    for key in _autos(ds):
        if key not in _OWN_AUTO and not key.endswith("nvme_path"):
            findings.refuse(
                key,
                "nothing fills it here",
                "write a value, or remove the key",
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


def followed(recipe: Recipe, ds_path: str | Path, world: int | None) -> list[Stated]:
    """Return the values that `recipe` takes from a JSON of one's own; `world`: as `following.follow` has it.

    What is wrong with the JSON is left to `resolve`. Raises ConfigError where it cannot be read.
    """
    path = find(ds_path, "--follow")
    findings = Findings(str(path), read(path))
    known_keys.check(findings)
    return following.follow(findings.config, recipe, world)


def _filled(
    config: Mapping[str, Any], values: Mapping[str, Any], autos: Mapping[str, Any]
) -> dict[str, Any]:
    """Copy `config`; `values` replace "auto" and absent keys, `autos` replace "auto" alone."""
    filled = copy.deepcopy(dict(config))
    for key, value in {**values, **autos}.items():
        written = lookup(filled, key)
        if written == "auto" or (written is None and key in values):
            put(filled, key, value)
    return filled


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set the value at a.b.c."""
    *sections, last = key.split(".")
    for name in sections:
        config = config.setdefault(name, {})
    config[last] = value


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
