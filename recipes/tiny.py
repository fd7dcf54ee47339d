"""`--tiny`: any recipe shrunk to a minute's work of two CPU cores, on the same code path.

Kept: family, objective, implementation, pattern of attention, kind of layout, ZeRO stage and offload (they
are the ds_config's), kind of checkpointing, precision, dropout, kind of schedule, and whether micro-batches
are accumulated.
"""

from __future__ import annotations

from itertools import chain, groupby
from typing import Any

from recipes.schema import Batch, Data, Model, Recipe, Schedule, Tokenizer

LAYERS = 4
HIDDEN = 64
HEADS = 4
VOCABULARY = 509  # prime: tensor parallelism has to pad it
SEQUENCE = 64  # or as many positions, where the recipe states these apart
STEPS = 20
# where the number of data-parallel ranks is left open: 1, 2, 4 and 8 divide it
GLOBAL = 8
# With banded layers: long enough for the kernel of blocks, as published lengths are.
BANDED_SEQUENCE = 256
WINDOW = 16
LEAST_SEQUENCE = 32  # of samples shorter than the positions are; wider than WINDOW
LEAST_LR = 1e-3  # with less, 20 steps learn nothing visible


def tiny(recipe: Recipe) -> Recipe:
    """Shrink a recipe; shrinking twice changes nothing more."""
    suffix = " (tiny)"
    chunk = recipe.activation_checkpointing
    positions, length = _lengths(recipe)
    tokenizer = Tokenizer.model_validate({"kind": recipe.model.facts.trained})
    degrees = {
        key: degree and min(2, degree)
        for key, degree in recipe.parallel.degrees.items()
    }
    most = {"validation_samples": 8, "validate_every": 10, "save_every": 10}
    run = {key: min(number, getattr(recipe.run, key)) for key, number in most.items()}
    shrunk = {
        "title": recipe.title.removesuffix(suffix) + suffix,
        "model": _model(recipe, positions, length),
        "sequence_length": length,
        "parallel": recipe.parallel.model_copy(update=degrees),
        "batch": Batch.model_validate(_batch(recipe.batch, recipe.parallel.dp)),
        "steps": min(STEPS, recipe.steps),
        "schedule": _schedule(recipe),
        "optimizer": recipe.optimizer.model_copy(
            update={"lr": max(LEAST_LR, recipe.optimizer.lr)}
        ),
        "activation_checkpointing": min(2, chunk) if isinstance(chunk, int) else chunk,
        "data": Data(
            tokenizer=tokenizer,
            masking=recipe.data.masking,
            attend=recipe.data.attend,
            positions=recipe.data.positions,
        ),
        "run": recipe.run.model_copy(update=run),
    }
    return recipe.model_copy(update=shrunk)


def _lengths(recipe: Recipe) -> tuple[int | None, int]:
    """Return the model's positions, None if the recipe states none, and the tokens of a sample.

    Samples keep their share of stated positions, so that phases of one model still differ. The tokens are
    an even number, for two tensor ranks to share.
    """
    most = SEQUENCE if recipe.model.attention_window is None else BANDED_SEQUENCE
    length = recipe.sequence_length
    stated = recipe.model.positions
    if stated is None:
        return None, min(most, length)
    if stated <= most:
        return stated, length
    share = most * length // stated
    return most, min(length, max(LEAST_SEQUENCE, share - share % 2))


def _model(recipe: Recipe, positions: int | None, length: int) -> Model:
    model = recipe.model
    sizes: dict[str, Any] = dict(
        layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab_size=VOCABULARY
    )
    if model.config:
        from recipes.transformers_config import shrunk

        sizes["positions"] = positions or length
        values = {**sizes, "config": shrunk(model.config, sizes)}
        return model.model_copy(update=values)
    columns = model.attention_columns
    patterns = model.attention_patterns
    window = _window(model.attention_window, recipe.sequence_length, length)
    if window and columns and model.attention_window:
        columns = max(1, columns * window // model.attention_window)
        patterns = min(patterns, window // columns)
    # as many kinds of layers in the same order: the longest run gets shorter first
    runs = [list(run) for _, run in groupby(model.attention)]
    for _ in model.attention[LAYERS:]:
        del max(runs, key=len)[1:2]
    return Model(
        **sizes,
        attention=tuple(chain.from_iterable(runs))[:LAYERS],
        attention_window=window,
        attention_columns=columns,
        attention_patterns=patterns,
        positions=positions,
        shared_layers=model.shared_layers,
        **model.model_dump(
            include={"family", "layer_norm", "sentence_head", "implementation"}
        ),
    )


def _window(window: int | None, length: int, shrunk: int) -> int | None:
    """Shrink the window to 16 positions, or keep its share of the sequence if that is large.

    `length`, `shrunk`: tokens of a sample before and after.
    """
    if window is None:
        return None
    if 8 * window <= 5 * length:
        return min(WINDOW, window)
    return min(shrunk - 1, -(-window * shrunk // length))


def _batch(batch: Batch, dp: int | None) -> dict[str, Any]:
    """Shrink the batch: micro-batch at most 2, two of them a step if the recipe accumulates."""
    if batch.rampup:  # twice as large after five steps
        half = _batch(batch.model_copy(update={"accumulation": 1, "rampup": None}), dp)
        size = half["global"]
        ramp = {"start": size, "increment": size, "samples": 5 * size}
        return half | {"accumulation": None, "global": 2 * size, "rampup": ramp}
    if dp is None:
        return {"global": GLOBAL, "micro": batch.micro and min(2, batch.micro)}
    accumulates = batch.accumulation or (
        batch.global_ // (batch.micro * dp) if batch.micro else 1
    )
    micro = min(2, batch.micro or batch.global_ // (dp * (batch.accumulation or 1)))
    accumulation = 2 if accumulates > 1 else 1
    return {
        "micro": micro,
        "accumulation": accumulation,
        "global": micro * accumulation * min(2, dp),
    }


def _schedule(recipe: Recipe) -> Schedule:
    """Scale warm-up and decay like the steps; the warm-up ends within a quarter of them."""
    schedule = recipe.schedule
    steps = min(STEPS, recipe.steps)
    shrunk = steps / recipe.steps
    decay = max(2, round((recipe.decay_steps or recipe.steps) * shrunk))
    warmup = min(
        max(1, round(schedule.warmup_steps * shrunk)), max(1, steps // 4), decay - 1
    )
    last = min(max(1, round((schedule.wsd_decay_steps or 0) * shrunk)), decay - warmup)
    values = {
        "decay_steps": schedule.decay_steps and decay,
        "warmup_steps": schedule.warmup_steps and warmup,
        "wsd_decay_steps": schedule.wsd_decay_steps and last,
    }
    return schedule.model_copy(update=values)
