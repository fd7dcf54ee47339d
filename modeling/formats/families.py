"""Conversions of each family to and from `transformers`."""

from __future__ import annotations

from dataclasses import replace

from modeling.formats.huggingface import bert, gpt2
from modeling.formats.huggingface.conversion import Conversion
from recipes.schema import Model

CONVERSIONS: dict[str, Conversion] = {"gpt2": gpt2.CONVERSION, "bert": bert.CONVERSION}


def conversion_of(model: Model) -> Conversion:
    """Return the conversion of the model's family; ValueError if `transformers` has no such family."""
    if model.family not in CONVERSIONS:
        raise ValueError(f"model.family={model.family}: there is no conversion to transformers")
    found = CONVERSIONS[model.family]
    return found if model.task_head == "none" else replace(found, usage=bert.TASK_USAGE[model.task_head])
