"""The comparison rule: may a run's numbers stand next to the published ones of its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ds_configs.findings import Findings
from ds_configs.jsonfile import ConfigError, find, read
from ds_configs.known_keys import lookup
from ds_configs.plan import ANY_GPU, Plan
from ds_configs.sections import zero
from recipes.key_paths import differences, is_part
from recipes.layout import Layout
from recipes.schema import Recipe

# Keys that change the amount of work: a ratio would compare two things.
SAME_WORK = ("model", "sequence_length", "batch.global", "activation_checkpointing")
DEGREES = {"tp": "tensor", "pp": "pipeline"}  # of the layout -> of a JSON's `parallel` section
REASONS = {
    "tiny": "tiny, another model",
    "unreadable": "the recipe cannot be read",
    "emulated": "fp16 emulated on a CPU",
}


@dataclass(frozen=True)
class Incomparable:
    """The reason why the numbers of a run cannot be compared with its row."""

    reason: Literal["tiny", "unreadable", "other", "emulated"]  # of `REASONS`, or other work by `keys`
    keys: tuple[str, ...] = ()
    sharding: tuple[str, str] | None = None  # and offload, of the run and of the row, if "ds_config" is a key

    def __str__(self) -> str:
        if self.reason in REASONS:
            return REASONS[self.reason]
        used = f" ({self.sharding[0]}; the row's is {self.sharding[1]})" if self.sharding else ""
        return f"other {', '.join(key + used if key == 'ds_config' else key for key in self.keys)}"


def not_comparable(
    row: Recipe | None, plan: Plan | None, *, tiny: bool, emulated_fp16: bool = False
) -> Incomparable | None:
    """Return the reason against comparing a run of `plan` with the row; None: they can be compared.

    `row` or `plan` is None if it cannot be read. Other hardware or precision is a deviation, but no reason.
    """
    if tiny:
        return Incomparable("tiny")
    if row is None or plan is None:
        return Incomparable("unreadable")
    sharded = changed_sharding(row, plan)
    keys = [*changed_work(row, plan.recipe), *changed_degrees(row, plan.layout)]
    if keys or sharded:
        return Incomparable("other", (*keys, *(["ds_config"] if sharded else [])), sharded)
    return Incomparable("emulated") if emulated_fp16 and plan.precision == "fp16" else None


def changed_work(row: Recipe, run: Recipe) -> list[str]:
    """Return the keys in which the recipes differ in their amount of work."""
    both = (recipe.compared() for recipe in (row, run))
    keys = [key for key, _, _ in differences(*both)]
    return [key for key in keys if is_part(key, SAME_WORK)]


def changed_degrees(row: Recipe, layout: Layout) -> list[str]:
    """Return the keys of other degrees than the row's: they change a rank's work and messages.

    If the row does not state tp or pp, its ds_config decides; if it does not state dp, any dp is right.
    """
    config, own = _config(row.ds_config), row.parallel.degrees
    for key, name in DEGREES.items():
        written = (lookup(config, f"parallel.{part}{name}") for part in ("", "default_"))
        own[key] = own[key] or next((degree for degree in written if isinstance(degree, int)), 1)
    return [f"parallel.{key}" for key, degree in own.items() if degree not in (None, getattr(layout, key))]


def changed_sharding(row: Recipe, plan: Plan) -> tuple[str, str] | None:
    """Return (sharding and offload of the run, the same of the row's JSON) if they differ."""
    expected, used = sharding(_config(row.ds_config)), sharding(plan.ds)
    return (used, expected) if expected and used and expected != used else None


def sharding(config: Mapping[str, Any]) -> str | None:
    """Name a JSON's ZeRO stage and offload, as "ZeRO-3, offload optimizer"; None for {}."""
    if not config:
        return None
    ignored = Findings("")
    stage = zero.stage(dict(config), ignored)
    parts = [f"ZeRO-{stage}", f"offload {zero.offload(dict(config), stage, ANY_GPU, ignored)}"]
    if lookup(dict(config), "activation_checkpointing.cpu_checkpointing"):
        parts.append("activations in CPU memory")
    return ", ".join(parts)


def short_name(ds_config: str) -> str:
    """Shorten the name of a ds_config to that in a plan: ds_configs/zero3.json -> zero3."""
    return Path(ds_config).name.removesuffix(".json")


def _config(name: str) -> dict[str, Any]:
    """Read the JSON as written; {} if it cannot be read."""
    try:
        return read(find(name))
    except ConfigError:
        return {}
