"""Refusals of DeepSpeed keys in runs with model.implementation=transformers."""

from __future__ import annotations

from typing import Any

from ds_configs.findings import Findings
from ds_configs.known_keys import lookup
from recipes.layout import padded_vocab
from recipes.problems import Problem, Setting
from recipes.schema import Recipe

_RUN = Setting("model.implementation", "transformers")
_FIX = "or --set model.implementation=megarecipes"


def check(recipe: Recipe, config: dict[str, Any], findings: Findings) -> None:
    """Refuse DeepSpeed's recomputation, which such a run would ignore."""
    section = lookup(config, "activation_checkpointing")
    if recipe.model.implementation != _RUN.value or not isinstance(section, dict):
        return
    if asked := [key for key, value in section.items() if value]:
        key = f"activation_checkpointing.{asked[0]}"
        came = f"{key}={str(section[asked[0]]).lower()} with ", _RUN
        rule = "its layers are recomputed by torch.utils.checkpoint, which DeepSpeed's section does not reach"
        fix = f"remove the section, take another --ds_config (zero3, zero3_offload), {_FIX}"
        findings.refuse(key, came, rule, fix)


def check_degree(recipe: Recipe, degree: Setting, origin: str, findings: Findings) -> None:
    """Refuse a degree of tensor or pipeline parallelism; `origin` names its source."""
    if recipe.model.implementation == _RUN.value and degree.value != 1:
        fix = f"take another --ds_config (zero1, zero2, zero3), {_FIX}"
        came = degree, f"{origin} with ", _RUN
        findings.problems.append(Problem(degree.key, came, "its GPT-2 is cut by ZeRO alone", fix))


def embedding_rows(recipe: Recipe, tp: int) -> int:
    """Return the rows of the embedding; that of transformers has no padding."""
    model = recipe.model
    padded = model.implementation != _RUN.value
    return padded_vocab(model.vocab_size, tp, model.vocab_divisible_by) if padded else model.vocab_size
