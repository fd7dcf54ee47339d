"""The `activation_checkpointing` section: DeepSpeed's storage of inputs for the recipe's recomputation."""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Findings
from ds_configs.known_keys import KEYS, lookup, shown, stated
from ds_configs.plan import Machine
from recipes.layout import Layout
from recipes.problems import Setting
from recipes.schema import Recipe

_SECTION = "activation_checkpointing"
PARTITION = f"{_SECTION}.partition_activations"


def partitions(recipe: Recipe, layout: Layout, machine: Machine) -> bool:
    """Decide if "auto" partitions activations, so that each tensor rank keeps a part of them.

    A single tensor rank, or ranks of a cut sequence, keep whole ones; a GPU then copies them to the host
    without waiting. On a CPU DeepSpeed 0.19 keeps parts alone.
    """
    return not machine.device.asynchronous or (layout.tp > 1 and not recipe.parallel.sequence)


def check(
    recipe: Recipe, config: dict[str, Any], layout: Layout | None, machine: Machine, findings: Findings
) -> None:
    """Refuse settings on which DeepSpeed would fail later; notice a section without effect."""
    chunk = recipe.checkpoint_interval
    section = {key: stated(config, f"{_SECTION}.{key}") for key in KEYS[_SECTION]}
    if lookup(config, PARTITION) == "auto":
        section["partition_activations"] = layout is not None and partitions(recipe, layout, machine)
    asked = [key for key in ("partition_activations", "cpu_checkpointing") if section[key]]
    if asked and not chunk and recipe.model.implementation == "megarecipes":
        does = f"{' and '.join(asked)} of {findings.where} do{'es' if len(asked) == 1 else ''} nothing"
        findings.notice(_SECTION, f"{does}: the recipe recomputes no layer (--set {_SECTION}=full: all)")
    if section["partition_activations"] and chunk and recipe.parallel.sequence:
        rule = "a tensor rank has its own positions already, of which DeepSpeed would keep a part"
        fix = "set it to false, or --set parallel.sequence=false"
        findings.refuse(
            PARTITION, (f"{PARTITION}=true with ", Setting("parallel.sequence", "true")), rule, fix
        )
    partition = 'set partition_activations to "auto", or remove the key'
    key = f"{_SECTION}.cpu_checkpointing"
    on_host = section["cpu_checkpointing"] and not machine.device.asynchronous
    if on_host and chunk and not section["partition_activations"]:
        rule = "on a CPU DeepSpeed 0.19 empties whole activations before it has copied them"
        findings.refuse(key, f"{key}=true", rule, partition)
    key = f"{_SECTION}.contiguous_memory_optimization"
    if section["contiguous_memory_optimization"]:
        chunks, number = -(-recipe.model.layers // chunk) if chunk else 0, section["number_checkpoints"]
        if not section["partition_activations"]:
            rule = "DeepSpeed has it for partitioned activations only"
            findings.refuse(key, f"{key}=true", rule, partition)
        if number is None or number < chunks:
            came = f"{key}=true with number_checkpoints={shown(number)}"
            rule = f"DeepSpeed makes room for so many, and the recipe has {chunks}"
            findings.refuse(key, came, rule, f"set number_checkpoints to {max(chunks, 1)}")
    key = "pipeline.activation_checkpoint_interval"
    if (value := stated(config, key)) not in (None, chunk) or isinstance(value, bool):
        came = f"{key}={shown(value)}"
        rule = "what is recomputed is the recipe's activation_checkpointing"
        findings.refuse(key, came, rule, "remove the key")
