"""Names and layouts of Megatron-LM's GPT and BERT in all its versions, and our names for them.

Facts from https://github.com/NVIDIA/Megatron-LM: tags v1.0, v2.0, 23.04 (`megatron/model`,
`megatron/checkpointing.py`), core_v0.8.0 (`megatron/legacy/model`, `megatron/core/models`), and
https://github.com/deepspeedai/Megatron-DeepSpeed and https://github.com/EleutherAI/gpt-neox
(`megatron/model/gpt_model.py`, `gpt2_model.py`, the pipelines' layers).
Every version has the same tensors, linear weights as (outputs, inputs); names and the rows of QKV differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from recipes.schema import Model

WORD = "embedding.word_embeddings.weight"
POSITION = "embedding.position_embeddings.weight"
LAST = "encoder.final_layernorm.weight"  # of the last pipeline stage
LAYER = re.compile(r"(encoder\.layers\.)(\d+)(\..+)")

# Patterns of each version's names -> one name, applied in this order.
_PATTERNS = (
    (r"^(module\.)+", ""),
    (r"^language_model\.", ""),
    (r"^(transformer|decoder)\.", "encoder."),  # 1.0 to 2.2; Megatron core
    # the last stage's copy
    (r"^word_embeddings_for_head\.", "embedding.word_embeddings."),
    (r"^output_layer\.weight$", WORD),  # Megatron core's name of the copy
    (r"^output_layer\.bias$", "lm_head.bias"),
    (r"\.local_embeddings\.", "."),  # under sequence parallelism
    (r"^lm_head\.(norm|layer_norm)\.", "lm_head.layernorm."),
    (r"^encoder\.final_norm\.", "encoder.final_layernorm."),
    (r"\.attention\.", ".self_attention."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.(post_attention_norm|pre_mlp_layernorm)\.", ".post_attention_layernorm."),
    # Transformer Engine fuses norms and matrices, with and without Megatron core.
    (r"\.self_attention\.(linear|layernorm)_qkv\.layer_norm_", ".input_layernorm."),
    (r"\.layernorm_mlp\.layer_norm_", ".post_attention_layernorm."),
    (r"\.layernorm_mlp\.fc1_", ".mlp.dense_h_to_4h."),
    (r"\.layernorm_mlp\.fc2_", ".mlp.dense_4h_to_h."),
    (r"\.mlp\.linear_fc1\.layer_norm_", ".post_attention_layernorm."),
    (r"\.(linear|layernorm)_qkv\.", ".query_key_value."),
    (r"\.self_attention\.(linear_)?proj\.", ".self_attention.dense."),
    (r"\.linear(_fc)?1\.", ".dense_h_to_4h."),  # Megatron core; gpt-neox
    (r"\.linear(_fc)?2\.", ".dense_4h_to_h."),
)
_RENAMES = tuple((re.compile(pattern), name) for pattern, name in _PATTERNS)

# Dimension of the cut over tensor ranks, by the end of a name; every rank has all of the other tensors.
_CUT = {
    "word_embeddings.weight": 0, "lm_head.bias": 0, "query_key_value.weight": 0, "query_key_value.bias": 0,
    "self_attention.dense.weight": 1, "dense_h_to_4h.weight": 0, "dense_h_to_4h.bias": 0,
    "dense_4h_to_h.weight": 1,
}  # fmt: skip

_TOP = {
    "gpt2": {"word.weight": WORD, "position.weight": POSITION},
    "bert": {
        "word.weight": WORD,
        "embedding.position": POSITION,
        "embedding.token_type": "embedding.tokentype_embeddings.weight",
        "decoder_bias.bias": "lm_head.bias",
    },
}
WITH_PADDING = frozenset({WORD, "lm_head.bias"})  # a row for each token, then padding
# Modules, each with a weight and a bias.
_FINAL_NORM = {"final_norm": "encoder.final_layernorm"}
_MASKED_HEAD = {"head.transform": "lm_head.dense", "head.norm": "lm_head.layernorm"}
SENTENCE_HEAD = {"head.pooler": "pooler.dense", "head.sentence": "binary_head"}
_PER_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.projection": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.expand": "mlp.dense_h_to_4h",
    "mlp.contract": "mlp.dense_4h_to_h",
}


def common_name(stored: str) -> str:
    """Return the common name of a tensor whose name differs between versions."""
    for pattern, name in _RENAMES:
        stored = pattern.sub(name, stored)
    return stored


def name_map(model: Model) -> Mapping[str, str]:
    """Map every parameter of the model: our name -> Megatron's."""
    modules = dict(_FINAL_NORM)
    for i in range(model.layers):
        modules |= {
            f"layers.{i}.{a}": f"encoder.layers.{i}.{b}" for a, b in _PER_LAYER.items()
        }
    if model.family == "bert":
        modules |= _MASKED_HEAD
        if model.sentence_head != "none":
            modules |= SENTENCE_HEAD
    found = dict(_TOP[model.family])
    for ours, theirs in modules.items():
        for leaf in (".weight", ".bias"):
            found[ours + leaf] = theirs + leaf
    return found


def cut_dimension(name: str) -> int | None:
    """Return the dimension of a tensor's cut over tensor ranks; None: each rank has all of it."""
    return next((dim for end, dim in _CUT.items() if name.endswith(end)), None)


def is_qkv(name: str) -> bool:
    """Check that the tensor is a layer's QKV, with rows for `heads_first`."""
    return ".query_key_value." in name


def is_whole(name: str, shape: Sequence[int]) -> bool:
    """Check that a layer's QKV matrix has its three parts; True for any other tensor."""
    matrix = name.endswith(".query_key_value.weight")
    return not matrix or [*shape[:1]] == [3 * size for size in shape[1:]]


def heads_first(rows: Tensor, heads: int, version: float) -> Tensor:
    """Reorder the QKV rows (heads x 3 x D, ...) of a slice from the checkpoint version's order to ours.

    Version 0 has (q/k/v, head, D), version 1.0 (head, D, q/k/v), 2.0 and later our (head, q/k/v, D).
    """
    rest = rows.shape[1:]
    if version < 1:
        ordered = rows.reshape(3, heads, -1, *rest).transpose(0, 1)
    elif version < 2:
        ordered = rows.reshape(heads, -1, 3, *rest).transpose(1, 2)
    else:
        return rows
    return ordered.reshape(rows.shape)
