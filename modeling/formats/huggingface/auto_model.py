"""Any model of `transformers` with the head of a language model, made from a recipe's `model.config`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_utils,
)

from recipes.schema import Model

ROLES = ("pad", "bos", "eos", "cls", "sep")


def special_tokens(
    model: Model, tokenizer: PreTrainedTokenizerBase
) -> dict[str, int | None]:
    """Return the numbers of special tokens, by their keys in a config.

    A model that reads no padding has none where the vocabulary pads with the token that ends documents: an
    embedding never trains its row of padding.
    """
    numbers = {
        f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ROLES
    }
    pad = numbers["pad_token_id"]
    if not model.facts.masked and pad in (
        numbers["eos_token_id"],
        numbers["sep_token_id"],
    ):
        numbers["pad_token_id"] = None
    return numbers


def config_of(
    model: Model, numbers: Mapping[str, int | None] | None = None
) -> PreTrainedConfig:
    """Return the config of a recipe's model, with these `special_tokens`.

    Without them it has the right shapes alone.
    """
    assert model.config is not None
    stated = dict(model.config)
    name = stated.pop("model_type")
    numbers = numbers or {"pad_token_id": 0}
    for role in ROLES:
        key = f"{role}_token_id"
        if hasattr(CONFIG_MAPPING[name], key):
            stated[key] = numbers.get(key)
    return AutoConfig.for_model(name, **stated, use_cache=False)


def class_of(model: Model) -> Any:
    """Return the class that makes the model."""
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
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return from_config(model, config)
