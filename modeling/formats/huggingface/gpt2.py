"""Conversion between our canonical GPT-2 weights and `transformers`' GPT-2.

Besides names two things differ. `transformers` stores linear weights as (inputs, outputs), and orders the
rows of QKV as (q/k/v, head, D). Ours are (head, q/k/v, D), so that a tensor-parallel slice has whole heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import transformers
from torch import Tensor

from modeling.formats.huggingface.conversion import (
    NO_DROPOUT,
    SAME,
    TRANSPOSED,
    Conversion,
    Form,
    Logits,
    NameEntry,
)
from modeling.transformer import GPT2_NORM_EPS
from recipes.schema import Dropout, Model

TOP = {
    "word.weight": "transformer.wte.weight",
    "position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
}


def _qkv_to_theirs(ours: Tensor, heads: int) -> Sequence[Tensor]:
    """(heads x 3 x D, H) -> (H, 3 x heads x D); biases (heads x 3 x D) -> (3 x heads x D)."""
    rows = ours.view(heads, 3, -1, *ours.shape[1:]).transpose(0, 1).reshape(ours.shape)
    return (rows.t() if rows.dim() == 2 else rows,)


def _qkv_to_ours(theirs: Sequence[Tensor], heads: int) -> Tensor:
    rows = theirs[0].t() if theirs[0].dim() == 2 else theirs[0]
    return (
        rows.reshape(3, heads, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)
    )


QKV = Form(_qkv_to_theirs, _qkv_to_ours)

# Modules of a layer, each with a weight and a bias: ours -> theirs, and the form of the weight.
PER_LAYER = {
    "attention_norm": ("ln_1", SAME),
    "attention.qkv": ("attn.c_attn", QKV),
    "attention.projection": ("attn.c_proj", TRANSPOSED),
    "mlp_norm": ("ln_2", SAME),
    "mlp.expand": ("mlp.c_fc", TRANSPOSED),
    "mlp.contract": ("mlp.c_proj", TRANSPOSED),
}


def name_map(model: Model) -> Iterator[NameEntry]:
    """Yield an entry for every parameter of the model; of shared layers one for each use."""
    for ours, theirs in TOP.items():
        yield NameEntry(ours, (theirs,))
    for i in range(model.layers):
        own = f"layers.{0 if model.shared_layers else i}"
        for ours, (theirs, form) in PER_LAYER.items():
            forms = {"weight": form, "bias": QKV if form is QKV else SAME}
            for leaf, its_form in forms.items():
                name = f"transformer.h.{i}.{theirs}.{leaf}"
                yield NameEntry(f"{own}.{ours}.{leaf}", (name,), its_form)


def _rename(stored: str) -> str | None:
    """Return the name in `GPT2LMHeadModel`, also of a bare `GPT2Model`; None for masks in old checkpoints."""
    if stored.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    if stored.startswith(("transformer.", "lm_head.")):
        return stored
    return f"transformer.{stored}"


def config(
    model: Model,
    positions: int,
    dropout: Dropout = NO_DROPOUT,
    tokenizer: transformers.PreTrainedTokenizerBase | None = None,
) -> transformers.GPT2Config:
    """Return the `GPT2Config` of the model; samples have no padding."""
    end = tokenizer.eos_token_id if tokenizer else None
    return transformers.GPT2Config(
        vocab_size=model.vocab_size, n_positions=positions, n_embd=model.hidden, n_layer=model.layers,
        n_head=model.heads, activation_function="gelu_new", layer_norm_epsilon=GPT2_NORM_EPS,
        resid_pdrop=dropout.hidden, embd_pdrop=dropout.hidden, attn_pdrop=dropout.attention,
        bos_token_id=end, eos_token_id=end, tie_word_embeddings=True,
    )  # fmt: skip


def logits(model: Any, tokens: Tensor, token_types: None, mask: Tensor) -> Logits:
    """Return the logits of every token that is not padding."""
    return (model(tokens).logits[mask],)


USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{directory}")
tokenizer = AutoTokenizer.from_pretrained("{directory}")
text = tokenizer({prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**text, max_new_tokens=40, do_sample=True)[0]))"""
CONVERSION = Conversion(
    lambda model: "GPT2LMHeadModel", config, name_map, _rename, {"lm_head.weight": TOP["word.weight"]},
    logits, USAGE,
)  # fmt: skip
