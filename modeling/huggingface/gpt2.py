"""Conversion between our canonical GPT-2 weights and `transformers`' GPT-2.

Besides names two things differ: `transformers` stores linear weights as (inputs, outputs), and orders the
rows of QKV as (q/k/v, head, D) where we order (head, q/k/v, D), so that a tensor-parallel slice holds whole
heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers

from modeling.huggingface.conversion import (
    SAME,
    TRANSPOSED,
    Conversion,
    Entry,
    Form,
    Logits,
    Tensors,
    check_names,
    to_canonical,
)
from modeling.transformer import GPT2_NORM_EPS
from recipes.schema import Model

TOP = {
    "word.weight": "transformer.wte.weight",
    "position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
}


def _qkv_to_theirs(ours: torch.Tensor, heads: int) -> Sequence[torch.Tensor]:
    """(heads x 3 x D, H) -> (H, 3 x heads x D); biases (heads x 3 x D) -> (3 x heads x D)."""
    rows = ours.view(heads, 3, -1, *ours.shape[1:]).transpose(0, 1).reshape(ours.shape)
    return (rows.t() if rows.dim() == 2 else rows,)


def _qkv_to_ours(theirs: Sequence[torch.Tensor], heads: int) -> torch.Tensor:
    rows = theirs[0].t() if theirs[0].dim() == 2 else theirs[0]
    return rows.reshape(3, heads, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


QKV = Form(_qkv_to_theirs, _qkv_to_ours)

# ours below layers.N. -> theirs below transformer.h.N., and the change of form
PER_LAYER = {
    "attention_norm.weight": ("ln_1.weight", SAME),
    "attention_norm.bias": ("ln_1.bias", SAME),
    "attention.qkv.weight": ("attn.c_attn.weight", QKV),
    "attention.qkv.bias": ("attn.c_attn.bias", QKV),
    "attention.projection.weight": ("attn.c_proj.weight", TRANSPOSED),
    "attention.projection.bias": ("attn.c_proj.bias", SAME),
    "mlp_norm.weight": ("ln_2.weight", SAME),
    "mlp_norm.bias": ("ln_2.bias", SAME),
    "mlp.expand.weight": ("mlp.c_fc.weight", TRANSPOSED),
    "mlp.expand.bias": ("mlp.c_fc.bias", SAME),
    "mlp.contract.weight": ("mlp.c_proj.weight", TRANSPOSED),
    "mlp.contract.bias": ("mlp.c_proj.bias", SAME),
}


def name_map(model: Model) -> Iterator[Entry]:
    """Every parameter of the model."""
    for ours, theirs in TOP.items():
        yield Entry(ours, (theirs,))
    for i in range(model.layers):
        for ours, (theirs, form) in PER_LAYER.items():
            yield Entry(f"layers.{i}.{ours}", (f"transformer.h.{i}.{theirs}",), form)


def from_transformers(theirs: Tensors, model: Model) -> dict[str, torch.Tensor]:
    """The state dict of `GPT2LMHeadModel`, or of `GPT2Model`, -> canonical float32 weights.

    Raises ValueError naming missing and unexpected tensors.
    """
    prefixed = {
        name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
        for name, tensor in theirs.items()
    }
    masks = (".attn.bias", ".attn.masked_bias")  # buffers that old checkpoints stored
    kept = {n: t for n, t in prefixed.items() if n not in CONVERSION.copies and not n.endswith(masks)}
    entries = list(name_map(model))
    check_names(set(kept), {name for entry in entries for name in entry.theirs}, "transformers weights")
    return to_canonical(kept, entries, model.heads)


def config(
    model: Model,
    *,
    positions: int,
    hidden_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    end_token: int | None = None,
    pad_token: int = 0,
) -> transformers.GPT2Config:
    """The `GPT2Config` of the same model; samples have no padding, so `pad_token` is not used."""
    return transformers.GPT2Config(
        vocab_size=model.vocab_size, n_positions=positions, n_embd=model.hidden, n_layer=model.layers,
        n_head=model.heads,
        activation_function="gelu_new", layer_norm_epsilon=GPT2_NORM_EPS, resid_pdrop=hidden_dropout,
        embd_pdrop=hidden_dropout,
        attn_pdrop=attention_dropout, bos_token_id=end_token, eos_token_id=end_token,
        tie_word_embeddings=True,
    )  # fmt: skip


def logits(model: Any, tokens: torch.Tensor, token_types: None, mask: torch.Tensor) -> Logits:
    """At every position that is not padding."""
    return (model(tokens).logits[mask],)


CONVERSION = Conversion(
    class_name=lambda model: "GPT2LMHeadModel",
    config=config,
    name_map=name_map,
    from_transformers=from_transformers,
    copies=frozenset({"lm_head.weight"}),
    logits=logits,
    usage="""\
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{directory}")
tokenizer = AutoTokenizer.from_pretrained("{directory}")
text = tokenizer({prompt}, return_tensors="pt")
print(tokenizer.decode(model.generate(**text, max_new_tokens=40, do_sample=True)[0]))""",
)
