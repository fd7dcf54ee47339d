"""What of a DeepSpeed JSON has no part in a run of `transformers`' modules (model.implementation=transformers)."""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Report
from ds_configs.known_keys import lookup
from recipes.layout import padded_vocab
from recipes.schema import Recipe

_FIX = "or --set model.implementation=megarecipes"


def check(recipe: Recipe, config: dict[str, Any], report: Report) -> None:
    """Refuse keys that such a run would ignore."""
    section = lookup(config, "activation_checkpointing")
    if recipe.model.implementation != "transformers" or not isinstance(section, dict):
        return
    if asked := [key for key, value in section.items() if value]:
        report.problem(
            f"{report.where}: activation_checkpointing.{asked[0]}={str(section[asked[0]]).lower()} with model.implementation=transformers: "
            "its layers are recomputed by torch.utils.checkpoint, which DeepSpeed's section does not reach; remove the section, take "
            f"another --ds_config (zero3, zero3_offload), {_FIX}"
        )


def check_degree(recipe: Recipe, text: str, value: int, report: Report) -> None:
    """Refuse a degree of tensor or pipeline parallelism; `text` names it and where it comes from."""
    if recipe.model.implementation == "transformers" and value > 1:
        report.problem(
            f"{text} with model.implementation=transformers: its GPT-2 is cut by ZeRO alone; take another --ds_config (zero1, zero2, "
            f"zero3), {_FIX}"
        )


def embedding_rows(recipe: Recipe, tp: int) -> int:
    """Rows of the embedding; that of transformers has no padding."""
    model = recipe.model
    return (
        model.vocab_size
        if model.implementation == "transformers"
        else padded_vocab(model.vocab_size, tp, model.vocab_divisible_by)
    )
