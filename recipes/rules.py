"""What the fields of one recipe owe each other, whatever the layout it is run with (that is `ds_configs.resolver`'s part).

One function per subject; each returns lines "what came: the rule: the fix", so that all problems are reported at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipes.schema import Recipe

GPT2_VOCABULARY = 50257  # Radford et al. 2019, section 2.2
SMALLEST_BPE = 257  # the 256 bytes, and the end-of-document token


def problems(recipe: Recipe) -> list[str]:
    """Every broken rule, as lines; empty when the recipe is consistent."""
    return [*_schedule(recipe), *_vocabulary(recipe), *_checkpointing(recipe)]


def _schedule(recipe: Recipe) -> list[str]:
    found = []
    schedule = recipe.schedule
    if schedule.min_lr > recipe.optimizer.lr:
        found.append(
            f"schedule.min_lr={schedule.min_lr} is above optimizer.lr={recipe.optimizer.lr}: the rate decays from lr to "
            "min_lr; set schedule.min_lr to optimizer.lr or less"
        )
    if schedule.kind != "constant" and schedule.warmup_steps >= recipe.decay_steps:
        end = "schedule.decay_steps" if schedule.decay_steps else "steps"
        found.append(
            f"schedule.warmup_steps={schedule.warmup_steps} is not below {end}={recipe.decay_steps}: the warm-up ends before "
            f"the decay does; set schedule.warmup_steps to {recipe.decay_steps - 1} or less"
        )
    return found


def _vocabulary(recipe: Recipe) -> list[str]:
    size, kind = recipe.model.vocab_size, recipe.data.tokenizer.kind
    if kind == "gpt2" and size != GPT2_VOCABULARY:
        return [
            f"model.vocab_size={size} with data.tokenizer.kind=gpt2: the published vocabulary has {GPT2_VOCABULARY} tokens "
            f"(padding for tensor parallelism comes on top); set model.vocab_size to {GPT2_VOCABULARY}, or "
            "data.tokenizer.kind to trained_bpe"
        ]
    if kind == "trained_bpe" and size < SMALLEST_BPE:
        return [
            f"model.vocab_size={size} with data.tokenizer.kind=trained_bpe: a byte-level vocabulary needs the 256 bytes and "
            f"one end-of-document token; set model.vocab_size to {SMALLEST_BPE} or more"
        ]
    if kind == "trained_bpe" and recipe.data.source == "hub":
        return [
            "data.tokenizer.kind=trained_bpe with data.source=hub: a vocabulary cannot be trained on a stream that is read "
            f"once; set data.tokenizer.kind to gpt2 and model.vocab_size to {GPT2_VOCABULARY}"
        ]
    return []


def _checkpointing(recipe: Recipe) -> list[str]:
    chunk, layers = recipe.activation_checkpointing, recipe.model.layers
    if isinstance(chunk, int) and chunk > layers:
        return [
            f"activation_checkpointing={chunk} is above model.layers={layers}: it is the number of layers recomputed "
            f'together; set it to {layers} or less, to "full" or to "none"'
        ]
    return []
