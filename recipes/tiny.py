"""`--tiny`: any recipe shrunk to what two CPU cores carry in a minute, on the same code path.

Kept: family, objective, implementation, pattern of attention, kind of layout, ZeRO stage and offload (they are the ds_config's), kind of
checkpointing, precision, dropout, kind of schedule, and whether micro-batches are accumulated.
"""

from __future__ import annotations

from itertools import chain, groupby
from typing import Any

from recipes.schema import Recipe

LAYERS = 4
HIDDEN = 64
HEADS = 4
VOCABULARY = 509  # prime: tensor parallelism has to pad it
SEQUENCE = 64
STEPS = 20
GLOBAL = 8  # where the number of data-parallel ranks is left open: 1, 2, 4 and 8 divide it
# Of models with banded layers: long enough for the kernel of blocks, as the published lengths are (modeling/banded_attention.py)
BANDED_SEQUENCE, WINDOW = 256, 16
LEAST_LR = 1e-3  # with less, 20 steps learn nothing visible


def tiny(recipe: Recipe) -> Recipe:
    """The recipe, shrunk; shrinking twice changes nothing more.

    Raises:
        pydantic.ValidationError: never for a valid recipe (our invariant).
    """
    values: dict[str, Any] = recipe.model_dump(by_alias=True, exclude_unset=True)
    suffix = " (tiny)"
    values["title"] = recipe.title if recipe.title.endswith(suffix) else recipe.title + suffix
    values["model"] = {
        "family": recipe.model.family, "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab_size": VOCABULARY,
        "layer_norm": recipe.model.layer_norm, "sentence_head": recipe.model.sentence_head,
        "implementation": recipe.model.implementation, "attention": _pattern(recipe.model.attention),
    }  # fmt: skip
    values["sequence_length"] = min(SEQUENCE, recipe.sequence_length)
    if recipe.model.attention_window is not None:
        values["sequence_length"] = min(BANDED_SEQUENCE, recipe.sequence_length)
        values["model"]["attention_window"] = _window(recipe.model.attention_window, recipe.sequence_length)
    values["parallel"] = {key: min(2, degree) for key, degree in recipe.parallel if degree}
    values["batch"] = _batch(recipe, values["parallel"].get("dp"))
    values |= _steps(recipe)
    values["optimizer"]["lr"] = max(LEAST_LR, recipe.optimizer.lr)
    if isinstance(recipe.activation_checkpointing, int):
        values["activation_checkpointing"] = min(2, recipe.activation_checkpointing)
    kind = "trained_wordpiece" if recipe.model.family == "bert" else "trained_bpe"
    values["data"] = {
        "source": "packaged",
        "tokenizer": {"kind": kind},
        "masking": recipe.data.masking.model_dump(),
    }
    values["run"] = _run(recipe, values.get("run", {}))
    return Recipe.model_validate(values)


def _pattern(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """At most LAYERS kinds of layers in the same order, both if there are two: the longest run of one kind gets shorter first."""
    runs = [list(run) for _, run in groupby(kinds)]
    for _ in range(len(kinds) - LAYERS):
        longest = max(runs, key=len)
        del longest[1:2]
    return tuple(chain.from_iterable(runs))[:LAYERS]


def _window(window: int, positions: int) -> int:
    """16 positions, a block's own and the one before it; or as much of the sequence as before, where that is most of it."""
    if 8 * window <= 5 * positions:
        return min(WINDOW, window)
    shrunk = min(BANDED_SEQUENCE, positions)
    return min(shrunk - 1, -(-window * shrunk // positions))


def _batch(recipe: Recipe, dp: int | None) -> dict[str, int]:
    """Micro-batch at most 2; accumulated (twice) if the recipe accumulates, or may once dp is known."""
    batch = recipe.batch
    if dp is None:
        known = {} if batch.micro is None else {"micro": min(2, batch.micro)}
        return known | {"global": GLOBAL}
    published_dp = recipe.parallel.dp
    assert published_dp is not None
    accumulates = batch.accumulation or (batch.global_ // (batch.micro * published_dp) if batch.micro else 1)
    micro = min(2, batch.micro or batch.global_ // (published_dp * (batch.accumulation or 1)))
    accumulation = 2 if accumulates > 1 else 1
    return {"micro": micro, "accumulation": accumulation, "global": micro * accumulation * dp}


def _steps(recipe: Recipe) -> dict[str, Any]:
    """At most 20 steps; warm-up and decay scaled alike, and the warm-up over after a quarter of the steps."""
    steps = min(STEPS, recipe.steps)
    schedule = recipe.schedule.model_dump(exclude_unset=True)
    shrunk = steps / recipe.steps
    decay = max(2, round(recipe.decay_steps * shrunk))
    if recipe.schedule.decay_steps is not None:
        schedule["decay_steps"] = decay
    if recipe.schedule.warmup_steps:
        schedule["warmup_steps"] = min(
            max(1, round(recipe.schedule.warmup_steps * shrunk)), max(1, steps // 4), decay - 1
        )
    return {"steps": steps, "schedule": schedule}


def _run(recipe: Recipe, run: dict[str, Any]) -> dict[str, Any]:
    shrunk = dict(run, validation_samples=min(8, recipe.run.validation_samples))
    for key, every in (("validate_every", recipe.run.validate_every), ("save_every", recipe.run.save_every)):
        if every:
            shrunk[key] = min(10, every)
    return shrunk
