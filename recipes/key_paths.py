"""Dotted keys of the recipe and of nested mappings, what two recipes differ in, and misspelt keys.

A table of `Keys` says which keys each question about two recipes is about.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from recipes.problems import nearest
from recipes.schema import Recipe

Path = Sequence[str | int]  # of keys, and indices of the parts of a list
Difference = tuple[str, Any, Any]  # dotted key, old value, new value


def submodel(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model in an annotation such as `Published | None` or `tuple[BlendPart, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return next(
            (model for part in get_args(annotation) if (model := submodel(part))), None
        )
    return None


def children(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Map the keys in the file to the fields of the model."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def shown(path: Path) -> str:
    """Write a path as users do: data.blend[1].weight."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def paths(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key: model, model.layers, … Keys inside lists have none."""
    for key, field in children(model).items():
        yield prefix + key
        below = submodel(field.annotation)
        if below and get_origin(field.annotation) is not tuple:
            yield from paths(below, f"{prefix}{key}.")


def known_prefix(path: Path) -> tuple[str | int, ...]:
    """Cut an error's location to keys of the schema and indices, from 0, of models in lists.

    pydantic appends union members and indices of plain values.
    """
    kept: list[str | int] = []
    for part in path:
        model = _model_at(kept)
        if model is None or (isinstance(part, str) and part not in children(model)):
            break
        kept.append(part)
    return tuple(kept)


def list_rule(path: Path) -> str:
    """Describe the parts of a key's list; empty if the key holds no list of models."""
    level = _model_at(path[:-1])
    part = _model_at(path)
    if (
        not level
        or not part
        or get_origin(children(level)[str(path[-1])].annotation) is not tuple
    ):
        return ""
    needed = (key for key, field in children(part).items() if field.is_required())
    return f"a list of parts, each with {', '.join(needed)}"


def is_text(path: Path) -> bool:
    """Tell whether the value of a known key is any text, or nothing."""
    level = _model_at(path[:-1])
    assert level
    key = str(path[-1])
    return children(level)[key].annotation in (str, str | None)


def suggestion(path: Path) -> str:
    """Suggest keys for an unknown one: siblings spelt alike, or the same word elsewhere."""
    from recipes import foreign_words

    for end in range(1, len(path)):
        if (
            isinstance(path[end], str)
            and isinstance(path[end - 1], str)
            and (rule := list_rule(path[:end]))
        ):
            return f"{shown(path[:end])} is {rule}: give it as a whole"
    level = _model_at(path[:-1])
    last = str(path[-1])
    siblings = list(children(level)) if level else []
    foreign = foreign_words.in_recipe(last.replace("-", "_"))
    if foreign:
        return foreign
    near = nearest(last, siblings)
    if near:
        return (
            f"did you mean {' or '.join(shown((*path[:-1], word)) for word in near)}?"
        )
    everywhere = list(paths())
    near = [key for key in everywhere if key.rsplit(".", 1)[-1] == last]
    if not near and not any(isinstance(part, int) for part in path):
        near = nearest(shown(path), everywhere)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return (
        f"{shown(path[:-1]) or 'a recipe'} has {', '.join(siblings)}"
        if siblings
        else "no such key"
    )


def _model_at(path: Path) -> type[BaseModel] | None:
    """Return the model of a key's value, or of its list's parts."""
    level: type[BaseModel] | None = Recipe
    for part in path:
        if isinstance(part, str):
            field = children(level).get(part) if level else None
            level = submodel(field.annotation) if field else None
    return level


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a.b", value) for every leaf of nested mappings; lists and empty mappings are leaves."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


@dataclass(frozen=True)
class Keys:
    """Dotted keys that a question is about, each with all below it."""

    of: Collection[str] | None = None  # None: all
    but: Collection[str] = ()  # of those

    def __contains__(self, key: str) -> bool:
        asked = self.of is None or is_part(key, self.of)
        return asked and not is_part(key, self.but)


# These change reports or the sharing of the work, never a number of the training.
NO_NUMBER = frozenset(
    {
        "title",
        "run",
        "ds_config",
        "parallel",
        "hardware",
        "published",
        "inferred",
        "differs",
        "unknown",
        "note",
    }
)
# May change on resuming: those above, keys of layout, rounding and reading of the same numbers, and the end of
# the run. Every other key decides the numbers of the training.
RESUMABLE = frozenset(
    {
        *NO_NUMBER,
        "activation_checkpointing",
        "batch.accumulation",
        "batch.micro",
        "data.broken_records",
        "model.implementation",
        "model.vocab_divisible_by",
        "precision",
        "steps",
    }
)
# May change besides where a run branches off.
OF_BRANCHES = frozenset(
    {
        *RESUMABLE,
        "batch",
        "data",
        "dropout",
        "model.positions",
        "optimizer",
        "schedule",
        "seed",
        "sequence_length",
    }
)
KEPT_BY_RESUME = Keys(but=RESUMABLE)
# The plan's facts show the layout and the rounding; the others that are left out are remarks.
NOTED_BY_RESUME = Keys(RESUMABLE, but={*NO_NUMBER - {"run"}, "batch", "precision"})
DECISIVE = Keys(but={*NO_NUMBER, "branch"})
# What the weights and moments are made for stays.
BRANCHED = Keys(
    OF_BRANCHES, but={*NO_NUMBER, "branch", "data.tokenizer", "optimizer.name"}
)
# Of the data, these leave its order.
SAME_ORDER = ("data.broken_records", "data.attend", "data.positions")
OTHER_TEXT = Keys({"data"}, but=SAME_ORDER)
# A branch with other values of these reads its data from their beginning.
READ_ANEW = Keys(
    {"data", "seed", "sequence_length"}, but=(*SAME_ORDER, "data.tokenizer")
)
# Decide the samples of the next step.
NEXT_STEP = Keys({"data", "seed", "sequence_length", "batch.global", "batch.rampup"})
# No deviation from a published row: they change no number, or are stated in another way.
DEVIATING = Keys(but={*NO_NUMBER, "branch", "batch.micro", "batch.accumulation"})
# Change the amount of work: a ratio would compare two things.
WORK = Keys({"model", "sequence_length", "batch.global", "activation_checkpointing"})
# Decide the text, its tokens or the objective, and so whether two losses are comparable.
_TEXT = {
    "data",
    "model.vocab_size",
    "model.family",
    "model.sentence_head",
    "model.task_head",
    "task.name",
}
TEXT = Keys(_TEXT, but={"data.streaming"})
TEXT_OF_GPT = Keys(_TEXT, but={"data.streaming", "data.masking", "model.family"})
# Decide the weights of a pretraining.
PRETRAINED = Keys(
    {
        "model",
        "sequence_length",
        "batch.global",
        "batch.rampup",
        "steps",
        "optimizer",
        "schedule",
        "dropout",
        "init_std",
        "data",
    }
)


def differences(old: Any, new: Any, asked: Keys = Keys()) -> list[Difference]:
    """List the differing leaves among keys; the value is "absent" on a side that lacks the key."""
    before = dict(flatten(old))
    after = dict(flatten(new))
    differing = []
    for key in {**before, **after}:
        was = before.get(key, "absent")
        now = after.get(key, "absent")
        if was != now and key in asked:
            differing.append((key, was, now))
    return differing


def changes(
    there: Recipe, now: Recipe, asked: Keys, *, stated: bool = False
) -> list[Difference]:
    """List the differences of two recipes in the keys that are asked for.

    `stated`: of schedules as they are stated, and not by the step of the learning rate's decay.
    """
    return differences(there.compared(stated), now.compared(stated), asked)


def key_of(setting: str) -> str:
    """Return the dotted key of a `key=value` as --set takes it."""
    return setting.partition("=")[0].strip()


def is_part(key: str, parts: Iterable[str]) -> bool:
    """Check whether a dotted key is one of `parts`, or lies below one."""
    return any(key == part or key.startswith(f"{part}.") for part in parts)
