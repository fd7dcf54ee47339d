"""DeepSpeed's ways of keeping model states, each as a DeepSpeed JSON."""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_configs.findings import find, read
from ds_configs.plan import Machine, Plan
from ds_configs.resolver import resolve
from recipes.layout import Layout
from recipes.schema import Recipe

JSON_NAME = "ds_config.json"
BATCH = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# of zero_optimization: what a way decides
DECIDED_KEYS = ("stage", "offload_optimizer", "offload_param")


@dataclass(frozen=True)
class Way:
    """A ZeRO stage, with nothing, the optimizer, or all model states offloaded to the host.

    Attributes:
        file: name of its JSON in ds_configs/.
        offload: name of another JSON, whose offload of the optimizer is added; None: nothing is added.
    """

    name: str
    file: str
    stage: int
    offload: str | None = None


WAYS = (
    Way("ZeRO-0", "zero0", 0),
    Way("ZeRO-1", "zero1", 1),
    Way("ZeRO-1 offload", "zero1", 1, offload="zero2_offload"),
    Way("ZeRO-2", "zero2", 2),
    Way("ZeRO-2 offload", "zero2_offload", 2),
    Way("ZeRO-3", "zero3", 3),
    Way("ZeRO-3 offload", "zero3_offload_optimizer", 3),
    Way("ZeRO-3 offload all", "zero3_offload", 3),
)


def config(
    way: Way, base: dict[str, Any] | None = None, layout: Layout | None = None
) -> dict[str, Any]:
    """Make the JSON of a way from its file, or from `base` with the way's stage and offload in it.

    With a layout its numbers stand in the JSON, so that the JSON is refused with any other.
    """
    own = read(find(way.file))
    if base is None:
        base = own
    document: dict[str, Any] = copy.deepcopy(base)
    given = (document.get("zero_optimization") or {}).items()
    kept = {key: value for key, value in given if key not in DECIDED_KEYS}
    zero = {**own["zero_optimization"], **kept, "stage": way.stage}
    if way.offload:
        section = read(find(way.offload))["zero_optimization"]
        zero["offload_optimizer"] = section["offload_optimizer"]
    document["zero_optimization"] = zero
    numbers: dict[str, Any] = dict.fromkeys(BATCH, "auto")
    document["parallel"] = {"tensor": "auto", "pipeline": "auto"}
    if layout:
        numbers = dict(
            zip(
                BATCH,
                (layout.global_batch, layout.micro, layout.accumulation),
                strict=True,
            )
        )
        document["parallel"] = {"tensor": layout.tp, "pipeline": layout.pp}
    return {**document, **numbers}


def resolved(
    document: dict[str, Any], recipe: Recipe, world: int | None, machine: Machine
) -> Plan:
    """Resolve a recipe under a DeepSpeed JSON that has no file yet. Raises ConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / JSON_NAME
        path.write_text(json_text(document))
        return resolve(recipe, path, world, machine)


def json_text(document: dict[str, Any]) -> str:
    """Return a DeepSpeed JSON as the text of a file."""
    return json.dumps(document, indent=2) + "\n"
