"""Conversion between our canonical GPT-2 weights and `transformers`' GPT-2, by one name map; and of either family by its recipe.

`modeling/huggingface/bert.py` has the same for BERT. GPT-2 has two differences beside names: `transformers` stores linear weights
as (inputs, outputs), and orders the rows of QKV as (q/k/v, head, D) where we order (head, q/k/v, D), so that a tensor-parallel
slice holds whole heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from modeling.huggingface import bert
from modeling.huggingface.names import Tensors, check_names, read_state_dict
from recipes.schema import Model

TOP = {
    "word.weight": "transformer.wte.weight",
    "position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
}

# ours below layers.N. -> theirs below transformer.h.N., and the change of form
PER_LAYER = {
    "attention_norm.weight": ("ln_1.weight", "same"),
    "attention_norm.bias": ("ln_1.bias", "same"),
    "attention.qkv.weight": ("attn.c_attn.weight", "qkv"),
    "attention.qkv.bias": ("attn.c_attn.bias", "qkv"),
    "attention.projection.weight": ("attn.c_proj.weight", "transposed"),
    "attention.projection.bias": ("attn.c_proj.bias", "same"),
    "mlp_norm.weight": ("ln_2.weight", "same"),
    "mlp_norm.bias": ("ln_2.bias", "same"),
    "mlp.expand.weight": ("mlp.c_fc.weight", "transposed"),
    "mlp.expand.bias": ("mlp.c_fc.bias", "same"),
    "mlp.contract.weight": ("mlp.c_proj.weight", "transposed"),
    "mlp.contract.bias": ("mlp.c_proj.bias", "same"),
}


def _qkv_to_hf(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(heads x 3 x D, H) -> (H, 3 x heads x D); biases (heads x 3 x D) -> (3 x heads x D)."""
    rows = x.view(heads, 3, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    return rows.t() if rows.dim() == 2 else rows


def _qkv_from_hf(x: torch.Tensor, heads: int) -> torch.Tensor:
    rows = x.t() if x.dim() == 2 else x
    return rows.reshape(3, heads, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


FORMS: dict[str, tuple[Callable, Callable]] = {  # to transformers, from transformers
    "same": (lambda x, heads: x, lambda x, heads: x),
    "transposed": (lambda x, heads: x.t(), lambda x, heads: x.t()),
    "qkv": (_qkv_to_hf, _qkv_from_hf),
}


def name_map(layers: int) -> Iterator[tuple[str, str, str]]:
    """(our name, their name, form) of every parameter."""
    for ours, theirs in TOP.items():
        yield ours, theirs, "same"
    for i in range(layers):
        for ours, (theirs, form) in PER_LAYER.items():
            yield f"layers.{i}.{ours}", f"transformer.h.{i}.{theirs}", form


def to_hf(ours: Tensors, layers: int, heads: int) -> dict[str, torch.Tensor]:
    """Canonical weights -> the state dict of `GPT2LMHeadModel`.

    Raises ValueError naming missing and unexpected tensors.
    """
    check_names(set(ours), {name for name, _, _ in name_map(layers)}, "canonical weights")
    return {theirs: FORMS[form][0](ours[name], heads).contiguous() for name, theirs, form in name_map(layers)}


def from_hf(theirs: Tensors, layers: int, heads: int) -> dict[str, torch.Tensor]:
    """The state dict of `GPT2LMHeadModel`, or of `GPT2Model` without its prefix, -> canonical float32 weights.

    Raises ValueError naming missing and unexpected tensors.
    """
    prefixed = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": t
        for name, t in theirs.items()
    }
    # The output layer is tied; masks are buffers that old checkpoints stored.
    kept = {
        n: t
        for n, t in prefixed.items()
        if n != "lm_head.weight" and not n.endswith((".attn.bias", ".attn.masked_bias"))
    }
    check_names(set(kept), {name for _, name, _ in name_map(layers)}, "transformers weights")
    return {
        ours: FORMS[form][1](kept[name].float(), heads).contiguous() for ours, name, form in name_map(layers)
    }


def hf_config(
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    positions: int,
    dropout: float = 0.0,
    end_token: int | None = None,
) -> Any:
    """The `GPT2Config` of the same model."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=vocab, n_positions=positions, n_embd=hidden, n_layer=layers, n_head=heads, activation_function="gelu_new",
        layer_norm_epsilon=1e-5, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=end_token,
        eos_token_id=end_token, tie_word_embeddings=True,
    )  # fmt: skip


# Of either family


def read_hf(
    directory: str | Path, model: Model, *, allow_missing_heads: bool = False
) -> dict[str, torch.Tensor]:
    """Canonical weights of the `transformers` model saved in `directory` (safetensors, one file or several; or .bin).

    `allow_missing_heads`: see `convert_bert.from_hf`.

    Raises ValueError where the directory holds no such model.
    """
    theirs = read_state_dict(directory)
    if model.family == "bert":
        return bert.from_hf(theirs, model, allow_missing_heads=allow_missing_heads)
    return from_hf(theirs, model.layers, model.heads)


def check_convertible(model: Model) -> None:
    """Raises ValueError where no `transformers` model computes what `model` does."""
    if any(window is not None for window in model.windows):
        raise ValueError(
            f"model.attention={list(model.attention)}, model.attention_window={model.attention_window}: transformers' GPT-2 has dense "
            "layers alone, and with these weights it would compute something else; only a run with model.attention=[dense] can be "
            "exported. The weights stay in the run's checkpoints, and launch/pretrain.py --resume goes on from them"
        )


def state_dict_of(ours: Tensors, model: Model) -> dict[str, torch.Tensor]:
    """Canonical weights -> the state dict of `class_of(model)`, tied copies left out.

    Raises ValueError as `check_convertible` does.
    """
    check_convertible(model)
    return bert.to_hf(ours, model) if model.family == "bert" else to_hf(ours, model.layers, model.heads)


def class_of(model: Model) -> type:
    """The `transformers` class of the model with its heads."""
    from transformers import GPT2LMHeadModel

    return bert.hf_class(model) if model.family == "bert" else GPT2LMHeadModel


def config_of(
    model: Model, *, positions: int, hidden_dropout: float = 0.0, attention_dropout: float = 0.0,
    end_token: int | None = None, pad_token: int = 0,
) -> Any:  # fmt: skip
    """The `transformers` configuration of the model. `end_token` is GPT-2's end of document, `pad_token` BERT's padding."""
    if model.family == "bert":
        return bert.hf_config(
            model,
            positions=positions,
            hidden_dropout=hidden_dropout,
            attention_dropout=attention_dropout,
            pad_token=pad_token,
        )
    config = hf_config(
        layers=model.layers, hidden=model.hidden, heads=model.heads, vocab=model.vocab_size, positions=positions,
        dropout=hidden_dropout, end_token=end_token,
    )  # fmt: skip
    config.attn_pdrop = attention_dropout
    return config
