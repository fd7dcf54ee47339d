"""Whether the numbers of a run may stand beside the published ones of its row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_configs.findings import Findings
from ds_configs.jsonfile import ConfigError, find, read
from ds_configs.known_keys import lookup
from ds_configs.plan import Machine
from ds_configs.sections import zero
from recipes.nested import differences
from recipes.schema import Recipe

# What changes the speed by more than the machine does: a ratio to the published number would compare two things.
SAME_WORK = ("model", "sequence_length", "batch.global", "activation_checkpointing")
DEGREES = {"tp": "tensor", "pp": "pipeline"}  # of the layout -> of a JSON's `parallel` section
_ANY = Machine("cuda", fp16=True, bf16=True, compiler=True, libaio=True)  # a machine that refuses nothing


def not_comparable(
    row: Recipe | None,
    run: Recipe | None,
    *,
    tiny: bool,
    precision: str,
    layout: Mapping[str, int] | None = None,
    ds_name: str | None = None,
    ds: Mapping[str, Any] | None = None,
) -> str | None:
    """Why the run's numbers are not those of the row; None where they are. None for a recipe stands for one that cannot be read.

    `layout` ("tp", "pp", "dp"), `ds_name` and `ds` (its resolved JSON): of the run; where one of them is not known, it is not compared.
    Other hardware or precision is a deviation, and the numbers are compared all the same.
    """
    if tiny:
        return "tiny, another model"
    if row is None or run is None:
        return "the recipe cannot be read"
    if changed := [
        *changed_work(row, run),
        *changed_degrees(row, layout or {}),
        *changed_sharding(row, ds_name, ds or {}),
    ]:
        return f"other {', '.join(changed)}"
    if "emulated" in precision:
        return "fp16 emulated on a CPU"
    return None


def changed_work(row: Recipe, run: Recipe) -> list[str]:
    """Keys of the recipe that differ and decide how much there is to compute."""
    keys = [key for key, _, _ in differences(_plain(row), _plain(run))]
    return [key for key in keys if any(key == part or key.startswith(f"{part}.") for part in SAME_WORK)]


def changed_degrees(row: Recipe, layout: Mapping[str, int]) -> list[str]:
    """Degrees that differ from the row's: the work of a rank is another one, and what it sends.

    tp and pp that the row does not state are those of its ds_config; dp that it does not state is whatever was started.
    """
    config = _config(row.ds_config)
    changed = []
    for key, name in DEGREES.items():
        own = getattr(row.parallel, key)
        if own is None:
            written = (lookup(config, f"parallel.{part}{name}") for part in ("", "default_"))
            own = next((degree for degree in written if isinstance(degree, int)), 1)
        changed += [f"parallel.{key}"] if layout.get(key, own) != own else []
    dp = row.parallel.dp
    return changed + (["parallel.dp"] if dp is not None and layout.get("dp", dp) != dp else [])


def changed_sharding(row: Recipe, ds_name: str | None, ds: Mapping[str, Any]) -> list[str]:
    """The ds_config, with both kinds, where the run shards or offloads other things than the row's JSON says."""
    expected, used = sharding(_config(row.ds_config)), sharding(ds or _config(ds_name))
    return [f"ds_config ({used}; the row's is {expected})"] if expected and used and expected != used else []


def sharding(config: Mapping[str, Any]) -> str | None:
    """ZeRO stage and what is kept outside the GPU, of a DeepSpeed JSON: "ZeRO-3, offload optimizer"; None of an empty one."""
    if not config:
        return None
    ignored = Findings("")
    stage = zero.stage(dict(config), ignored)
    parts = [f"ZeRO-{stage}", f"offload {zero.offload(dict(config), stage, _ANY, ignored)}"]
    return ", ".join(
        parts
        + (
            ["activations in CPU memory"]
            if lookup(dict(config), "activation_checkpointing.cpu_checkpointing")
            else []
        )
    )


def short_name(ds_config: str) -> str:
    """As a plan names it: ds_configs/zero3.json -> zero3."""
    return Path(ds_config).name.removesuffix(".json")


def _config(name: str | None) -> dict[str, Any]:
    """The JSON as written; empty where there is none to read."""
    if name is None:
        return {}
    try:
        return read(find(name))
    except ConfigError:
        return {}


def _plain(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", by_alias=True)
