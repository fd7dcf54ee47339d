"""Keys and defaults of a model in config.json, in Megatron's arguments and in our recipes; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.families import BERT_UNCASED_VOCABULARY, FAMILIES, GPT2_VOCABULARY
from recipes.schema import Model

SHAPE = (
    "model.layers",
    "model.hidden",
    "model.heads",
    "model.vocab_size",
    "model.positions",
)
Fixed = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class ConfigForm:
    """The config.json, or the arguments, of one model type. Absent keys have their defaults.

    Attributes:
        family: `model.family` of such models.
        shape: key of a recipe -> (their key, their default).
        width: key of the MLP's width and its default; None stands for four times the hidden size.
        fixed: their key -> the values of our model, which it cannot change; the first is their default.
        layer_norm: the placement of this type, if the family has a type for each.
        says: beginning of messages about its values.
    """

    model_type: str
    family: str
    shape: Mapping[str, tuple[str, int]]
    width: tuple[str, int | None]
    fixed: Fixed
    layer_norm: str | None = None
    says: str = "config.json says"

    @property
    def keys(self) -> set[str]:
        """Every key of theirs that is read."""
        return {*self.fixed, self.width[0], *(key for key, _ in self.shape.values())}


def _shape(keys: str, *defaults: int) -> dict[str, tuple[str, int]]:
    given = defaults or [0] * len(SHAPE)
    return dict(zip(SHAPE, zip(keys.split(), given, strict=True), strict=True))


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
_GPT2_SHAPE = _shape(
    "n_layer n_embd n_head vocab_size n_positions", 12, 768, 12, GPT2_VOCABULARY, 1024
)
_BERT_KEYS = "num_hidden_layers hidden_size num_attention_heads vocab_size max_position_embeddings"
_BERT_SHAPE = _shape(_BERT_KEYS, 12, 768, 12, BERT_UNCASED_VOCABULARY, 512)
_MEGATRON_BERT_SHAPE = _shape(_BERT_KEYS, 24, 1024, 16, 29056, 512)
FORMS = (
    ConfigForm("gpt2", "gpt2", _GPT2_SHAPE, ("n_inner", None), _GPT2_FIXED),
    ConfigForm(
        "bert", "bert", _BERT_SHAPE, ("intermediate_size", 3072), _BERT_FIXED, "post"
    ),
    ConfigForm(
        "megatron-bert",
        "bert",
        _MEGATRON_BERT_SHAPE,
        ("intermediate_size", 4096),
        _BERT_FIXED,
        "pre",
    ),
)

_OFF = (False, None)
# Arguments of Megatron-LM's training; `Checkpoint.config` makes "gelu" and "vocab_size" of several.
_MEGATRON_FIXED: Fixed = {
    "swiglu": _OFF,
    "squared_relu": _OFF,
    "glu_activation": (None,),
    "normalization": ("LayerNorm", "layernorm", None),
    "apply_layernorm_1p": _OFF,
    "apply_residual_connection_post_layernorm": _OFF,
    "untie_embeddings_and_output_weights": _OFF,
    "group_query_attention": _OFF,
    "position_embedding_type": ("learned_absolute", "absolute", None),
    "use_rotary_position_embeddings": _OFF,
    "num_experts": (None, 1, [1]),
    # of gpt-neox's configuration
    "norm": ("layernorm", None),
    "pos_emb": ("learned", None),
    "activation": ("gelu", None),
    "gpt_j_residual": _OFF,
    "no_weight_tying": _OFF,
    "use_mup": _OFF,
    "attention_config": (None,),
}
_MEGATRON_SHAPE = _shape(
    "num_layers hidden_size num_attention_heads vocab_size max_position_embeddings"
)
_WIDTH = ("ffn_hidden_size", None)
_ARGUMENTS = "its arguments say"
_GPT_FIXED: Fixed = {**_MEGATRON_FIXED, "gelu": ("tanh",), "layernorm_epsilon": (1e-5,)}
# Megatron's BERT always has another GELU and epsilon than ours: it is accepted, with a message.
MEGATRON_FORMS = (
    ConfigForm(
        "megatron-lm-gpt", "gpt2", _MEGATRON_SHAPE, _WIDTH, _GPT_FIXED, None, _ARGUMENTS
    ),
    ConfigForm(
        "megatron-lm-bert",
        "bert",
        _MEGATRON_SHAPE,
        _WIDTH,
        _MEGATRON_FIXED,
        "pre",
        _ARGUMENTS,
    ),
)


def run_forms() -> tuple[ConfigForm, ...]:
    """Return the forms of runs of this project, with our keys, of every family registered by now."""
    shape = _shape(" ".join(SHAPE))
    forms = []
    for name, family in FAMILIES.items():
        for placement in family.placements or (None,):
            called = f"megarecipes-{name}"
            if placement:
                called += f"-{placement}-LN"
            forms.append(
                ConfigForm(
                    called, name, shape, ("", None), {}, placement, "its recipe says"
                )
            )
    return tuple(forms)


def form_of(model: Model, forms: Sequence[ConfigForm]) -> ConfigForm | None:
    """Return the form of the model's own type, or None if it has none."""
    for form in forms:
        placed = form.layer_norm in (None, model.layer_norm)
        if placed and form.family == model.family:
            return form
    return None
