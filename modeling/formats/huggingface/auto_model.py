"""Any model of `transformers` with the head of a language model, made from a recipe's `model.config`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_utils,
)
from transformers.utils import logging

from recipes.schema import Model

TOKENS = "pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"


def special_tokens(
    model: Model, tokenizer: PreTrainedTokenizerBase
) -> dict[str, int | None]:
    """Return the numbers of special tokens by their keys in a config.

    A model that reads no padding has none where the vocabulary pads with the token that ends documents: an
    embedding never trains its row of padding.
    """
    numbers = {key: getattr(tokenizer, key) for key in TOKENS}
    pad = TOKENS[0]
    if not model.facts.masked and numbers[pad] == tokenizer.eos_token_id:
        numbers[pad] = None
    of_all = TOKENS[:3]  # types; the others are of some
    return {key: n for key, n in numbers.items() if n is not None or key in of_all}


def config_of(
    model: Model, numbers: Mapping[str, int | None] | None = None
) -> PreTrainedConfig:
    """Return the config of a recipe's model, with these `special_tokens`.

    Without them it has the right shapes alone.
    """
    numbers = numbers or dict.fromkeys(TOKENS, 0)
    return AutoConfig.for_model(
        **{**(model.config or {}), **numbers, "use_cache": False}
    )


def class_of(model: Model) -> Any:
    """Return the class that makes a model."""
    return AutoModelForMaskedLM if model.facts.masked else AutoModelForCausalLM


def from_config(model: Model, config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model in float32."""
    built: PreTrainedModel = class_of(model).from_config(config, dtype=torch.float32)
    built.tie_weights()  # from_config leaves this out where no weights are drawn
    return built


def on_meta(model: Model) -> PreTrainedModel:
    """Build the model without weights."""
    with whole(), torch.device("meta"):
        return from_config(model, config_of(model))


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Have transformers partition no model during the block, under ZeRO-3 either."""
    name = "is_deepspeed_zero3_enabled"
    with mock.patch.object(modeling_utils, name, lambda: False):
        yield


def drawn(model: Model, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Build the model with the weights that transformers draws after `torch.manual_seed(seed)`."""
    with whole(), torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return from_config(model, config)


def loaded(model: Model, directory: Path) -> tuple[PreTrainedModel, set[str]]:
    """Read a model that `save_pretrained` wrote, in float32, and the names of tensors that do not fit it.

    It has the recipe's shape, never one that a class has by default.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its table of what does not fit, which is returned
    how: dict[str, Any] = dict(dtype=torch.float32, output_loading_info=True)
    how |= dict(config=config_of(model), ignore_mismatched_sizes=True)
    with whole():
        built, found = class_of(model).from_pretrained(directory, **how)
    amiss = {*found["missing_keys"], *found["unexpected_keys"]}
    return built, amiss.union(name for name, *_ in found["mismatched_keys"])
