"""How `transformers`' config.json states what our models have.

Needs no torch: initial weights are refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.schema import Model
from recipes.vocabularies import BERT_UNCASED_VOCABULARY, GPT2_VOCABULARY

Fixed = tuple[tuple[str, Any, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class ConfigForm:
    """The config.json of one model type. Absent keys have their defaults.

    Attributes:
        shape: key of a recipe -> (their key, their default).
        width: key of the MLP's width and its default; None stands for four times the hidden size.
        fixed: (their key, their default, the values that our model has and cannot change).
        layer_norm: the placement that this type has, where those of the family are several types.
    """

    model_type: str
    shape: Mapping[str, tuple[str, int]]
    width: tuple[str, int | None]
    fixed: Fixed
    layer_norm: str | None = None


_BERT_FIXED: Fixed = (
    ("hidden_act", "gelu", ("gelu",)),
    ("layer_norm_eps", 1e-12, (1e-12,)),
    ("type_vocab_size", 2, (2,)),
    ("position_embedding_type", "absolute", ("absolute", None)),
    ("is_decoder", False, (False,)),
    ("add_cross_attention", False, (False,)),
    ("tie_word_embeddings", True, (True,)),
)


def _bert(
    model_type: str, layer_norm: str, layers: int, hidden: int, heads: int, vocabulary: int
) -> ConfigForm:
    shape = {
        "model.layers": ("num_hidden_layers", layers),
        "model.hidden": ("hidden_size", hidden),
        "model.heads": ("num_attention_heads", heads),
        "model.vocab_size": ("vocab_size", vocabulary),
        "sequence_length": ("max_position_embeddings", 512),
    }
    return ConfigForm(model_type, shape, ("intermediate_size", 4 * hidden), _BERT_FIXED, layer_norm)


FORMS: Mapping[str, tuple[ConfigForm, ...]] = {
    "gpt2": (
        ConfigForm(
            "gpt2",
            shape={
                "model.layers": ("n_layer", 12),
                "model.hidden": ("n_embd", 768),
                "model.heads": ("n_head", 12),
                "model.vocab_size": ("vocab_size", GPT2_VOCABULARY),
                "sequence_length": ("n_positions", 1024),
            },
            width=("n_inner", None),
            fixed=(
                ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh")),
                ("layer_norm_epsilon", 1e-5, (1e-5,)),
                ("scale_attn_weights", True, (True,)),
                ("scale_attn_by_inverse_layer_idx", False, (False,)),
                ("add_cross_attention", False, (False,)),
                ("tie_word_embeddings", True, (True,)),
            ),
        ),
    ),
    "bert": (
        _bert("bert", "post", 12, 768, 12, BERT_UNCASED_VOCABULARY),
        _bert("megatron-bert", "pre", 24, 1024, 16, 29056),
    ),
}


def form_of(model: Model) -> ConfigForm:
    """The form of the model's own type."""
    return next(form for form in FORMS[model.family] if form.layer_norm in (None, model.layer_norm))
