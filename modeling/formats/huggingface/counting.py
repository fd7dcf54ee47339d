"""Parameters and operations of a model of `transformers` by its config, counted by torch, without weights."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.initialization import no_init_weights

from modeling.formats.huggingface import auto_model
from recipes.schema import Model


@lru_cache(maxsize=64)
def parameters(model: Model) -> int:
    """Count the parameters, tied ones once."""
    return sum(
        parameter.numel() for parameter in auto_model.on_meta(model).parameters()
    )


@lru_cache(maxsize=64)
def operations(model: Model, length: int, *, again: bool) -> int:
    """Count the operations of the matrix products of a sample, forward and backward.

    Attention has the full square, as in the count of our own models. A masked LM has logits at every position.
    `again`: the layers' forward runs again in the backward pass. Returns 0 for a model whose products depend
    on its numbers, as the choice of experts does: they cannot be counted.
    """
    config = auto_model.config_of(model)
    # attention and experts in plain products
    config._attn_implementation = config._experts_implementation = "eager"
    with FakeTensorMode() as fake, no_init_weights(), auto_model.whole():
        built = auto_model.from_config(model, config).train()
    if again:
        built.gradient_checkpointing_enable({"use_reentrant": False})
    counter = FlopCounterMode(display=False)
    try:
        with fake, counter:
            tokens = torch.zeros(1, length, dtype=torch.long)
            mask = torch.ones_like(tokens)
            built(input_ids=tokens, attention_mask=mask).logits.sum().backward()
    except RuntimeError:
        return 0
    return counter.get_total_flops()
