"""A model of `transformers` by its config: canonical names are its own, and a conversion changes nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from modeling.formats.huggingface import auto_model
from modeling.formats.huggingface.conversion import (
    NO_DROPOUT,
    Conversion,
    Logits,
    NameEntry,
)
from recipes.schema import Dropout, Model

CAUSAL_USAGE = """\
from transformers import AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained("{directory}")
write = pipeline("text-generation", model="{directory}", tokenizer=tokenizer)
print(write({prompt})[0]["generated_text"])"""
MASKED_USAGE = """\
from transformers import AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained("{directory}")
fill = pipeline("fill-mask", model="{directory}", tokenizer=tokenizer)
print(fill({prompt})[0]["sequence"])"""


def conversion_of(model: Model) -> Conversion:
    """Return the conversion of the model to its own class; `tied` has the first name of each copy."""
    bare = auto_model.on_meta(model)
    first = {parameter: name for name, parameter in bare.named_parameters()}
    names = [NameEntry(name, (name,)) for name in first.values()]
    every = bare.named_parameters(remove_duplicate=False)
    tied = {name: first[each] for name, each in every if name != first[each]}
    usage = MASKED_USAGE if model.facts.masked else CAUSAL_USAGE
    return Conversion(
        lambda model: type(bare).__name__,
        config,
        lambda model: names,
        lambda name: name,
        tied,
        logits,
        usage,
    )


def config(
    model: Model,
    positions: int,
    dropout: Dropout = NO_DROPOUT,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedConfig:
    """Return the model's config with the numbers of its special tokens; the rest stands in the recipe's."""
    assert model.config is not None
    numbers = auto_model.special_tokens(model, tokenizer) if tokenizer else None
    made = auto_model.config_of(model, numbers)
    # training keeps none
    made.use_cache = model.config.get("use_cache", not model.facts.masked)
    return made


def logits(
    model: Any, tokens: Tensor, token_types: Tensor | None, mask: Tensor
) -> Logits:
    """Return the logits of all tokens but padding; its training gives no token types."""
    outcome = model(input_ids=tokens, attention_mask=mask.long())
    return (outcome.logits[mask],)
