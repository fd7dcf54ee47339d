"""Keys and defaults of a model in config.json, in Megatron's arguments and in our recipes; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.families import BERT_UNCASED_VOCABULARY, FAMILIES, GPT2_VOCABULARY, FamilyFacts
from recipes.schema import Model

SHAPE = ("model.layers", "model.hidden", "model.heads", "model.vocab_size", "model.positions")
Fixed = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class ConfigForm:
    """The config.json, or the arguments, of one model type. Absent keys have their defaults.

    Attributes:
        shape: key of a recipe -> (their key, their default).
        width: key of the MLP's width and its default; None stands for four times the hidden size.
        fixed: their key -> the values of our model, which it cannot change; the first is their default.
        layer_norm: the placement of this type, if the family has a type for each.
        says: beginning of messages about its values.
    """

    model_type: str
    shape: Mapping[str, tuple[str, int]]
    width: tuple[str, int | None]
    fixed: Fixed
    layer_norm: str | None = None
    says: str = "config.json says"


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


Forms = Mapping[str, tuple[ConfigForm, ...]]
FORMS: Forms = {
    "gpt2": (ConfigForm("gpt2", _GPT2_SHAPE, ("n_inner", None), _GPT2_FIXED),),
    "bert": (
        _bert("bert", "post", 12, 768, 12, BERT_UNCASED_VOCABULARY),
        _bert("megatron-bert", "pre", 24, 1024, 16, 29056),
    ),
}

# Arguments of Megatron-LM's training; `Checkpoint.config` makes "gelu" and "vocab_size" of several.
_MEGATRON_FIXED: Fixed = {
    "swiglu": (False, None),
    "squared_relu": (False, None),
    "glu_activation": (None,),
    "normalization": ("LayerNorm", "layernorm", None),
    "apply_layernorm_1p": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "untie_embeddings_and_output_weights": (False, None),
    "group_query_attention": (False, None),
    "position_embedding_type": ("learned_absolute", "absolute", None),
    "use_rotary_position_embeddings": (False, None),
    "num_experts": (None, 1, [1]),
}
_MEGATRON_SHAPE = _shape(
    "num_layers hidden_size num_attention_heads vocab_size max_position_embeddings", 0, 0, 0, 0, 0
)


def _megatron(model_type: str, fixed: Fixed, layer_norm: str | None = None) -> ConfigForm:
    width, fixed = ("ffn_hidden_size", None), {**_MEGATRON_FIXED, **fixed}
    return ConfigForm(model_type, _MEGATRON_SHAPE, width, fixed, layer_norm, "its arguments say")


# Megatron's BERT always has another GELU and epsilon than ours: it is accepted, with a message.
MEGATRON_FORMS: Forms = {
    "gpt2": (_megatron("megatron-lm-gpt", {"gelu": ("tanh",), "layernorm_epsilon": (1e-5,)}),),
    "bert": (_megatron("megatron-lm-bert", {}, "pre"),),
}


def _run(family: FamilyFacts) -> Iterator[ConfigForm]:
    """Yield the forms of a run of this project, whose recipe has our keys."""
    shape = _shape(" ".join(SHAPE), 0, 0, 0, 0, 0)
    for placement in family.placements or (None,):
        name = f"megarecipes-{family.name}" + (f"-{placement}-LN" if placement else "")
        yield ConfigForm(name, shape, ("", None), {}, placement, "its recipe says")


def run_forms() -> Forms:
    """Return the forms of runs of every family that is registered by now."""
    return {name: tuple(_run(family)) for name, family in FAMILIES.items()}


def family_of(form: ConfigForm) -> str:
    """Return the family of models of a form."""
    tables = (FORMS, MEGATRON_FORMS, run_forms())
    return next(family for table in tables for family, forms in table.items() if form in forms)


def form_of(model: Model, forms: Forms = FORMS) -> ConfigForm | None:
    """Return the form of the model's own type, or None if it has none."""
    of_family = forms.get(model.family, ())
    return next((form for form in of_family if form.layer_norm in (None, model.layer_norm)), None)
