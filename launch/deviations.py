"""Everything in which a run is not the recipe as it is written, each thing stated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_configs.layout import share_batch
from launch.comparability import short_name
from launch.files import differences

# Fields of a recipe whose change is no deviation: they change no number, or appear elsewhere among the deviations.
UNREMARKABLE = (
    "title", "note", "published", "hardware", "inferred", "differs", "unknown", "run", "ds_config", "parallel", "batch.micro",
    "batch.accumulation",
)  # fmt: skip


def deviations(plan: Any, row: Mapping[str, Any], *, original: Any, tiny: bool, emulated_fp16: bool) -> list[str]:
    """One line each. `row`: the results row so far. `original`: the recipe before --tiny, --set and --steps; None: as the plan has it."""
    recipe, reference = plan.recipe, original or plan.recipe
    found = [f"{row['status']}: {row['status_is']}"] if row["status_is"] else []
    found += plan.notices
    if tiny:
        found.append("tiny: the recipe was shrunk (--tiny), so its numbers are not those of the model it names")
    if original is not None:
        found += _changed_fields(original, recipe)
    if row["ds_config"] != short_name(reference.ds_config):
        found.append(f"ds_config: run with {row['ds_config']}, the recipe's is {short_name(reference.ds_config)}")
    found += _changed_layout(reference, row["layout"])
    if not tiny:
        found += [f"{key}: not as in the source; {how}" for key, how in recipe.differs.items()]
        found += [f"{key}: not published; {reason}" for key, reason in recipe.unknown.items()]
    if reference.hardware:
        found.append(f"hardware: run on {row['hardware']}, the recipe's is {reference.hardware}")
    said = any(notice.startswith("precision:") for notice in plan.notices)
    if plan.precision != recipe.precision and not said:
        found.append(f"precision: {plan.precision}, the recipe's is {recipe.precision}")
    if emulated_fp16 and plan.precision == "fp16" and not said:
        found.append("precision: fp16 is emulated on a CPU, so its speed means nothing")
    if row["steps"] < recipe.steps:
        found.append(f"steps: {row['steps']} of the recipe's {recipe.steps}")
    return list(dict.fromkeys(found))


def _changed_fields(original: Any, recipe: Any) -> list[str]:
    old_fields, new_fields = (each.model_dump(mode="json", by_alias=True) for each in (original, recipe))
    for fields, each in ((old_fields, original), (new_fields, recipe)):
        fields["schedule"]["decay_steps"] = each.decay_steps  # null and the number it stands for are the same schedule
    changed = [
        change for change in differences(old_fields, new_fields)
        if not any(change[0] == key or change[0].startswith(f"{key}.") for key in UNREMARKABLE)
    ]  # fmt: skip
    return [f"{key}: {new}, the recipe's is {old}" for key, old, new in changed]


def _changed_layout(reference: Any, layout: Mapping[str, int]) -> list[str]:
    """Degrees and shares of the batch that are not those that the reference states, or that follow from what it states."""
    parallel, batch = reference.parallel, reference.batch
    # A degree that the recipe does not state is the ds_config's, or the launcher's, to choose.
    stated = {f"parallel.{key}": getattr(parallel, key) for key in ("tp", "pp", "dp") if key in parallel.model_fields_set}
    shares: tuple[int | None, int | None] | str = (batch.micro, batch.accumulation)
    if parallel.dp is not None and shares != (None, None):
        shares = share_batch(*shares, batch.global_, parallel.dp, parallel.pp)
    if not isinstance(shares, str):
        stated |= dict(zip(("batch.micro", "batch.accumulation"), shares, strict=True))
    used = {key: layout[key.partition(".")[2]] for key in stated}
    return [f"{key}: {used[key]}, the recipe's is {own}" for key, own in stated.items() if own is not None and used[key] != own]
