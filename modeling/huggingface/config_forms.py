"""How `transformers`' config.json states what our models have; needs no torch, to refuse before a start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.schema import Model
from recipes.vocabularies import BERT_UNCASED_VOCABULARY, GPT2_VOCABULARY

SHAPE = ("model.layers", "model.hidden", "model.heads", "model.vocab_size", "sequence_length")
Fixed = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class ConfigForm:
    """The config.json of one model type. Absent keys have their defaults.

    Attributes:
        shape: key of a recipe -> (their key, their default).
        width: key of the MLP's width and its default; None stands for four times the hidden size.
        fixed: their key -> the values that our model has and cannot change; the first is their default.
        layer_norm: the placement that this type has, where those of the family are several types.
    """

    model_type: str
    shape: Mapping[str, tuple[str, int]]
    width: tuple[str, int | None]
    fixed: Fixed
    layer_norm: str | None = None


def _shape(keys: str, *defaults: int) -> dict[str, tuple[str, int]]:
    return dict(zip(SHAPE, zip(keys.split(), defaults, strict=True), strict=True))


_GPT2_FIXED: Fixed = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_BERT_FIXED: Fixed = {
    "hidden_act": ("gelu",),
    "layer_norm_eps": (1e-12,),
    "type_vocab_size": (2,),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
_GPT2_SHAPE = _shape("n_layer n_embd n_head vocab_size n_positions", 12, 768, 12, GPT2_VOCABULARY, 1024)


def _bert(model_type: str, layer_norm: str, layers: int, hidden: int, heads: int, words: int) -> ConfigForm:
    keys = "num_hidden_layers hidden_size num_attention_heads vocab_size max_position_embeddings"
    shape = _shape(keys, layers, hidden, heads, words, 512)
    return ConfigForm(model_type, shape, ("intermediate_size", 4 * hidden), _BERT_FIXED, layer_norm)


FORMS: Mapping[str, tuple[ConfigForm, ...]] = {
    "gpt2": (ConfigForm("gpt2", _GPT2_SHAPE, ("n_inner", None), _GPT2_FIXED),),
    "bert": (
        _bert("bert", "post", 12, 768, 12, BERT_UNCASED_VOCABULARY),
        _bert("megatron-bert", "pre", 24, 1024, 16, 29056),
    ),
}


def form_of(model: Model) -> ConfigForm:
    """The form of the model's own type."""
    return next(form for form in FORMS[model.family] if form.layer_norm in (None, model.layer_norm))
