"""Conversion between our canonical BERT weights and `transformers`', a name map for each LayerNorm placement.

Post-LN is `BertForPreTraining`, pre-LN `MegatronBertForPreTraining`; without a sentence head
`BertForMaskedLM` and `MegatronBertForMaskedLM`. Besides names one thing differs: they hold query, key and
value apart, each (heads x D, H); we hold one matrix with rows (head, q/k/v, D), so that a tensor-parallel
slice holds whole heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from modeling.huggingface import conversion
from modeling.huggingface.conversion import NO_DROPOUT, Conversion, Entry, Form, Logits, Tensors
from modeling.transformer import BERT_NORM_EPS
from recipes.schema import Dropout, Model

PARAMETERS = {
    "word.weight": "bert.embeddings.word_embeddings.weight",
    "embedding.position": "bert.embeddings.position_embeddings.weight",
    "embedding.token_type": "bert.embeddings.token_type_embeddings.weight",
}

# Modules, each with a weight and a bias: ours -> theirs; of layers, below layers.N. and bert.encoder.layer.N.
PER_LAYER = {
    "attention.projection": "attention.output.dense",
    "mlp.expand": "intermediate.dense",
    "mlp.contract": "output.dense",
}
QKV_NAMES = ("attention.self.query", "attention.self.key", "attention.self.value")
MASKED_HEAD = {
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
SENTENCE_HEAD = {"head.pooler": "bert.pooler.dense", "head.sentence": "cls.seq_relationship"}
DECODER_BIAS = Entry("decoder_bias.bias", ("cls.predictions.bias",))


class Placement(NamedTuple):
    """Where a placement of LayerNorm has its norms, and what `transformers` calls the model."""

    top: Mapping[str, str]
    per_layer: Mapping[str, str]
    prefix: str  # of the names of their classes


_POST_NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
_PRE_NORMS = {"attention_norm": "attention.ln", "mlp_norm": "ln"}
PLACEMENTS = {
    "post": Placement({"embedding.norm": "bert.embeddings.LayerNorm"}, _POST_NORMS, "Bert"),
    "pre": Placement({"final_norm": "bert.encoder.ln"}, _PRE_NORMS, "MegatronBert"),
}

# Copies of tied tensors, and a buffer that old checkpoints stored.
TIED = {
    "cls.predictions.decoder.weight": PARAMETERS["word.weight"],
    "cls.predictions.decoder.bias": DECODER_BIAS.theirs[0],
}
BUFFERS = frozenset({"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"})


def _fused(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Query, key and value, each (heads x D, ...), -> (heads x 3 x D, ...)."""
    by_head = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
    return torch.stack(by_head, dim=1).reshape(-1, *parts[0].shape[1:])


def _apart(fused: Tensor, heads: int) -> Sequence[Tensor]:
    """(heads x 3 x D, ...) -> query, key and value, each (heads x D, ...)."""
    by_part = fused.view(heads, 3, -1, *fused.shape[1:]).unbind(1)
    return [part.reshape(-1, *fused.shape[1:]) for part in by_part]


QKV = Form(to_theirs=_apart, to_ours=_fused)


def name_map(model: Model) -> Iterator[Entry]:
    """Every parameter of the model; three of theirs where ours is fused."""
    placement = PLACEMENTS[model.layer_norm]
    yield from (Entry(ours, (theirs,)) for ours, theirs in PARAMETERS.items())
    modules = [Entry(ours, (theirs,)) for ours, theirs in placement.top.items()]
    for i in range(model.layers):
        here, there = f"layers.{i}.", f"bert.encoder.layer.{i}."
        modules.append(Entry(f"{here}attention.qkv", tuple(there + name for name in QKV_NAMES), QKV))
        one_to_one = {**PER_LAYER, **placement.per_layer}.items()
        modules += [Entry(here + ours, (there + theirs,)) for ours, theirs in one_to_one]
    heads = MASKED_HEAD | (SENTENCE_HEAD if model.sentence_head != "none" else {})
    modules += [Entry(ours, (theirs,)) for ours, theirs in heads.items()]
    for ours, theirs, form in modules:
        for leaf in ("weight", "bias"):
            yield Entry(f"{ours}.{leaf}", tuple(f"{name}.{leaf}" for name in theirs), form)
    yield DECODER_BIAS


def from_transformers(
    theirs: Tensors, model: Model, *, allow_missing_heads: bool = False
) -> dict[str, Tensor]:
    """The state dict of a `transformers` BERT of this placement -> canonical float32 weights.

    A pooler and a sentence head are left out where the model has none. `allow_missing_heads`: parameters of
    heads that the weights lack (as a `BertModel`'s do) are missing in the result too, for the caller to fill.

    Raises ValueError naming missing and unexpected tensors, or where decoder and embedding are not tied.
    """
    found = _under_one_name(theirs)
    if model.sentence_head == "none":
        unused = tuple(f"{name}." for name in SENTENCE_HEAD.values())
        found = {name: tensor for name, tensor in found.items() if not name.startswith(unused)}
    entries = list(name_map(model))
    heads = [entry for entry in entries if entry.ours.startswith(("head.", "decoder_bias."))]
    missing_heads = [entry for entry in heads if found.keys().isdisjoint(entry.theirs)]
    if allow_missing_heads:
        entries = [entry for entry in entries if entry not in missing_heads]
    elif missing_heads and not any(name.startswith("cls.") for name in found):
        missing = ", ".join(entry.ours for entry in missing_heads[:4])
        came = f"transformers weights without heads ({missing}, ... are missing)"
        bare = f"a bare {PLACEMENTS[model.layer_norm].prefix}Model has no head to predict tokens with"
        raise ValueError(f"{came}: pretraining starts from a {class_name(model)}; {bare}")
    keys = "model.layers, model.family, model.layer_norm and model.sentence_head"
    return conversion.to_canonical(found, entries, model.heads, keys)


def _under_one_name(theirs: Tensors) -> dict[str, Tensor]:
    """Their tensors under the names of `BertForPreTraining`, each once.

    Handles a bare `BertModel` (no prefix), LayerNorm's gamma and beta of TensorFlow, and tied copies.
    """
    found = {}
    for name, tensor in theirs.items():
        name = name if name.startswith(("bert.", "cls.")) else f"bert.{name}"
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if name not in BUFFERS:
            found[name] = tensor
    for copy, original in TIED.items():
        tied = found.pop(copy, None)
        if tied is not None and not torch.equal(found.setdefault(original, tied), tied):
            came = f"transformers weights have a {copy} of its own"
            raise ValueError(f"{came}: in our BERT it is the same tensor as {original}")
    return found


def class_name(model: Model) -> str:
    """Name of the `transformers` class that holds the model with its heads."""
    heads = "ForMaskedLM" if model.sentence_head == "none" else "ForPreTraining"
    return PLACEMENTS[model.layer_norm].prefix + heads


def config(
    model: Model, positions: int, dropout: Dropout = NO_DROPOUT, end: int | None = None, pad: int = 0
) -> transformers.PretrainedConfig:
    """The `BertConfig` or `MegatronBertConfig` of the same model; `end` is GPT-2's."""
    return getattr(transformers, PLACEMENTS[model.layer_norm].prefix + "Config")(
        vocab_size=model.vocab_size, max_position_embeddings=positions, hidden_size=model.hidden,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, intermediate_size=4 * model.hidden,
        hidden_act="gelu", layer_norm_eps=BERT_NORM_EPS, type_vocab_size=2, pad_token_id=pad,
        hidden_dropout_prob=dropout.hidden, attention_probs_dropout_prob=dropout.attention,
        tie_word_embeddings=True,
    )  # fmt: skip


def logits(model: Any, tokens: Tensor, token_types: Tensor, mask: Tensor) -> Logits:
    """Of every token that is not padding, and of the sentence head where the model has one."""
    outcome = model(tokens, attention_mask=mask.long(), token_type_ids=token_types)
    if "prediction_logits" in outcome:
        return outcome.prediction_logits[mask], outcome.seq_relationship_logits
    return (outcome.logits[mask],)


USAGE = """\
from transformers import AutoModelForMaskedLM, AutoTokenizer
model = AutoModelForMaskedLM.from_pretrained("{directory}")
tokenizer = AutoTokenizer.from_pretrained("{directory}")
masked = tokenizer({prompt}, return_tensors="pt")
guesses = model(**masked).logits.argmax(-1)
filled = guesses.where(masked.input_ids == tokenizer.mask_token_id, masked.input_ids)
print(tokenizer.decode(filled[0], skip_special_tokens=True))"""
CONVERSION = Conversion(class_name, config, name_map, from_transformers, frozenset(TIED), logits, USAGE)
