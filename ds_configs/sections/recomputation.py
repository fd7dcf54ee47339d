"""The `activation_checkpointing` section: DeepSpeed's storage of inputs for the recipe's recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_configs.findings import Findings, shown
from ds_configs.known_keys import KEYS
from ds_configs.plan import Machine
from recipes.layout import Layout
from recipes.problems import Setting
from recipes.schema import Recipe

_SECTION = "activation_checkpointing"
PARTITION = f"{_SECTION}.partition_activations"
_TO_PARTITION = 'set partition_activations to "auto", or remove the key'


def partitions(recipe: Recipe, layout: Layout, machine: Machine) -> bool:
    """Decide if "auto" partitions activations, so that each tensor rank keeps a part of them.

    A single tensor rank, or ranks of a cut sequence, keep whole ones; a GPU then copies them to the host
    without waiting. On a CPU DeepSpeed 0.19 keeps parts alone.
    """
    return not machine.device.asynchronous or (
        layout.tp > 1 and not recipe.parallel.sequence
    )


def check(
    recipe: Recipe, layout: Layout | None, machine: Machine, findings: Findings
) -> None:
    """Refuse settings on which DeepSpeed would fail later; notice a section without effect."""
    chunk = recipe.checkpoint_interval
    section = {key: findings.stated(f"{_SECTION}.{key}") for key in KEYS[_SECTION]}
    if findings.lookup(PARTITION) == "auto":
        section["partition_activations"] = layout is not None and partitions(
            recipe, layout, machine
        )
    if any(problem.key == PARTITION for problem in findings.problems):
        section["partition_activations"] = True  # what follows from it is no second one
    effective = (
        "partition_activations",
        "cpu_checkpointing",
        "contiguous_memory_optimization",
    )
    asked = [key for key in effective if section[key]]
    if asked and not chunk and recipe.model.implementation == "megarecipes":
        does = f"{' and '.join(asked)} of {findings.where} do{'es' if len(asked) == 1 else ''} nothing"
        findings.notice(
            _SECTION,
            f"{does}: the recipe recomputes no layer (--set {_SECTION}=full: all)",
        )
    if section["partition_activations"] and chunk and recipe.parallel.sequence:
        came = f"{PARTITION}=true with ", Setting("parallel.sequence", "true")
        findings.refuse(
            PARTITION,
            "a tensor rank has its own positions already, of which DeepSpeed would keep a part",
            "set it to false, or --set parallel.sequence=false",
            came,
        )
    on_host = section["cpu_checkpointing"] and not machine.device.asynchronous
    if on_host and chunk and not section["partition_activations"]:
        findings.refuse(
            f"{_SECTION}.cpu_checkpointing",
            "on a CPU DeepSpeed 0.19 empties whole activations before it has copied them",
            _TO_PARTITION,
        )
        section["partition_activations"] = True
    if section["contiguous_memory_optimization"]:
        _check_contiguous(recipe, section, findings)
    by_torch = [key for key, value in section.items() if value]
    if by_torch and recipe.model.implementation == "transformers":
        key = f"{_SECTION}.{by_torch[0]}"
        rule = "its layers are recomputed by torch.utils.checkpoint, which DeepSpeed's section does not reach"
        others = "or take another --ds_config (zero3, zero3_offload)"
        came = (
            f"{key}={shown(section[by_torch[0]])} with ",
            Setting("model.implementation", "transformers"),
        )
        findings.refuse(key, rule, f"remove the section, {others}", came)
    key = "pipeline.activation_checkpoint_interval"
    value = findings.stated(key)
    if value not in (None, chunk) or isinstance(value, bool):
        findings.refuse(
            key,
            "what is recomputed is the recipe's activation_checkpointing",
            "remove the key",
        )


def _check_contiguous(
    recipe: Recipe, section: Mapping[str, Any], findings: Findings
) -> None:
    """Check contiguous memory for what is recomputed; take it out where nothing is."""
    chunk = recipe.checkpoint_interval
    if not chunk:  # DeepSpeed would ask for the number of chunks all the same
        findings.lookup(_SECTION).pop("contiguous_memory_optimization")
        return
    key = f"{_SECTION}.contiguous_memory_optimization"
    chunks = -(-recipe.model.layers // chunk)
    number = section["number_checkpoints"]
    if not section["partition_activations"]:
        findings.refuse(
            key, "DeepSpeed has it for partitioned activations only", _TO_PARTITION
        )
    if number is None or number < chunks:
        findings.refuse(
            key,
            f"DeepSpeed makes room for so many, and the recipe has {chunks}",
            f"set number_checkpoints to {chunks}",
            beside=f" with number_checkpoints={number or 'null'}",
        )
