"""A BERT of `transformers` for the tests that set ours next to it, and what both are given."""

from __future__ import annotations

import torch
import transformers

from modeling.formats.huggingface.bert import CONVERSION, config
from recipes.schema import Recipe

VOCABULARY, LENGTH = 83, 16
LENGTHS = torch.tensor([LENGTH, 9, 1])  # of the three samples
REAL = torch.arange(LENGTH) < LENGTHS[:, None]


def their_bert(wanted: Recipe, kind: type | None = None) -> transformers.PreTrainedModel:
    """The recipe's model, or its encoder as `kind`; no weight, bias or norm is near its initial value."""
    torch.manual_seed(3)
    settings = config(wanted.model, positions=wanted.sequence_length)
    model = (kind or CONVERSION.model_class(wanted.model))(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def random_input() -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, token types), each (3, LENGTH)."""
    generator, size = torch.Generator().manual_seed(5), (len(LENGTHS), LENGTH)
    return torch.randint(VOCABULARY, size, generator=generator), torch.randint(2, size, generator=generator)
