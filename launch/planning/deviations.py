"""Everything in which a run is not the recipe as it is written, each thing stated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch.planning.comparability import short_name
from recipes.layout import share_batch
from recipes.nested import flatten
from recipes.problems import Problem
from recipes.tiny import tiny as shrink

# Fields of a recipe whose change is no deviation: they change no number, or appear elsewhere among the deviations.
UNREMARKABLE = (
    "title", "note", "published", "hardware", "inferred", "differs", "unknown", "run", "ds_config", "parallel", "batch.micro",
    "batch.accumulation",
)  # fmt: skip
# What --tiny makes smaller; the line "tiny: ..." says so of all of them. Whatever else it changes is stated.
SHRUNK = ("model", "sequence_length", "batch", "steps", "schedule", "activation_checkpointing", "data")
# What a recipe says of these beside its numbers ("differs", "unknown") is not about the tiny run.
REPLACED = (
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.vocab_size",
    "sequence_length",
    "batch",
    "steps",
    "data",
    "parallel",
)


def deviations(
    plan: Any, row: Mapping[str, Any], *, original: Any, tiny: bool, emulated_fp16: bool
) -> list[str]:
    """One line each. `row`: the results row so far. `original`: the recipe before --tiny, --set and --steps; None: as the plan has it."""
    recipe, reference = plan.recipe, original or plan.recipe
    found = [f"{row['status']}: {row['status_is']}"] if row["status_is"] else []
    found += map(str, plan.notices)
    if tiny:
        found.append(
            "tiny: the recipe was shrunk (--tiny), so its numbers are not those of the model it names"
        )
    if original is not None:
        found += _changed_fields(original, recipe, tiny)
    if row["ds_config"] != short_name(reference.ds_config):
        found.append(
            f"ds_config: run with {row['ds_config']}, the recipe's is {short_name(reference.ds_config)}"
        )
    found += _changed_layout(reference, row["layout"], tiny)
    for remarks, what in ((recipe.differs, "not as in the source"), (recipe.unknown, "not published")):
        found += [
            f"{key}: {what}; {text}"
            for key, text in remarks.items()
            if not (tiny and (key == "model" or _belongs(key, REPLACED)))
        ]
    if reference.hardware:
        found.append(f"hardware: run on {row['hardware']}, the recipe's is {reference.hardware}")
    said = any(notice.key == "precision" for notice in plan.notices)
    if plan.precision != recipe.precision and not said:
        found.append(f"precision: {plan.precision}, the recipe's is {recipe.precision}")
    if emulated_fp16 and plan.precision == "fp16" and not said:
        found.append("precision: fp16 is emulated on a CPU, so its speed means nothing")
    if row["steps"] < recipe.steps:
        found.append(f"steps: {row['steps']} of the recipe's {recipe.steps}")
    return list(dict.fromkeys(found))


def _changed_fields(original: Any, recipe: Any, tiny: bool) -> list[str]:
    """Each field beside the recipe's own; beside the shrunk recipe's where --tiny made it smaller."""
    own, small, used = (_fields(each) for each in (original, shrink(original) if tiny else original, recipe))
    said = []
    for key in {**own, **small, **used}:
        written, shrunk, value = (fields.get(key, "absent") for fields in (own, small, used))
        if _belongs(key, UNREMARKABLE):
            continue
        if written != shrunk and _belongs(key, SHRUNK):
            said += [f"{key}: {value}, tiny's is {shrunk}"] if value != shrunk else []
        elif value != written:
            by_tiny = " (tiny raises it)" if value == shrunk else ""  # optimizer.lr
            said.append(f"{key}: {value}{by_tiny}, the recipe's is {written}")
    return said


def _fields(recipe: Any) -> dict[str, Any]:
    """Dotted key -> value of every leaf."""
    fields = recipe.model_dump(mode="json", by_alias=True)
    fields["schedule"]["decay_steps"] = (
        recipe.decay_steps
    )  # null and the number it stands for are the same schedule
    return dict(flatten(fields))


def _belongs(key: str, parts: Sequence[str]) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in parts)


def _changed_layout(reference: Any, layout: Mapping[str, int], tiny: bool) -> list[str]:
    """Degrees and shares of the batch that are not those that the reference states, or that follow from what it states."""
    own, asked = _stated(reference), _stated(shrink(reference) if tiny else reference)
    used = {key: layout[key.partition(".")[2]] for key in asked}
    return [
        f"{key}: {used[key]}, {'the recipe' if own.get(key) == value else 'tiny'}'s is {value}"
        for key, value in asked.items()
        if value is not None and used[key] != value
    ]


def _stated(reference: Any) -> dict[str, int | None]:
    parallel, batch = reference.parallel, reference.batch
    # A degree that the recipe does not state is the ds_config's, or the launcher's, to choose.
    stated = {f"parallel.{key}": degree for key, degree in parallel if degree is not None}
    shares: tuple[int | None, int | None] | Problem = (batch.micro, batch.accumulation)
    if parallel.dp is not None and shares != (None, None):
        shares = share_batch(*shares, batch.global_, parallel.dp, parallel.pp or 1)
    if not isinstance(shares, Problem):
        stated |= dict(zip(("batch.micro", "batch.accumulation"), shares, strict=True))
    return stated
