"""Conversions of each family to and from `transformers`."""

from __future__ import annotations

from dataclasses import replace

from modeling.formats.huggingface.conversion import Conversion
from recipes.schema import Model


def conversion_of(model: Model) -> Conversion:
    """Return the conversion of the model's family; ValueError if `transformers` has no such family."""
    if model.family == "gpt2":
        from modeling.formats.huggingface import gpt2

        return gpt2.CONVERSION
    if model.family != "bert":
        raise ValueError(
            f"model.family={model.family}: there is no conversion to transformers"
        )
    from modeling.formats.huggingface import bert

    if model.task_head == "none":
        return bert.CONVERSION
    return replace(bert.CONVERSION, usage=bert.TASK_USAGE[model.task_head])
