"""Conversion between our canonical BERT weights and `transformers`', a name map for each LayerNorm placement.

Post-LN is `BertForPreTraining`, pre-LN `MegatronBertForPreTraining`; without a sentence head
`BertForMaskedLM` and `MegatronBertForMaskedLM`; with a head for a task `BertForSequenceClassification`,
`BertForQuestionAnswering`, `BertForMultipleChoice`. Besides names one thing differs: they hold query, key and
value apart, each (heads x D, H); we hold one matrix with rows (head, q/k/v, D), so that a tensor-parallel
slice holds whole heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from modeling.formats.huggingface.conversion import (
    NO_DROPOUT,
    SAME,
    Conversion,
    Form,
    Logits,
    NameEntry,
)
from modeling.transformer import BERT_NORM_EPS
from recipes.schema import Dropout, Model

PARAMETERS = {
    "word.weight": "bert.embeddings.word_embeddings.weight",
    "embedding.position": "bert.embeddings.position_embeddings.weight",
    "embedding.token_type": "bert.embeddings.token_type_embeddings.weight",
}

# Modules, each with a weight and a bias: ours -> theirs; in layers below layers.N. and bert.encoder.layer.N.
PER_LAYER = {
    "attention.qkv": "attention.self.query attention.self.key attention.self.value",
    "attention.projection": "attention.output.dense",
    "mlp.expand": "intermediate.dense",
    "mlp.contract": "output.dense",
}
MASKED_HEAD = {
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
SENTENCE_HEAD = {
    "head.pooler": "bert.pooler.dense",
    "head.sentence": "cls.seq_relationship",
}
DECODER_BIAS = NameEntry("decoder_bias.bias", ("cls.predictions.bias",))
_SAMPLE_HEAD = {"head.pooler": "bert.pooler.dense", "head.classifier": "classifier"}
TASK_HEADS = {
    "classification": _SAMPLE_HEAD,
    "span": {"head.span": "qa_outputs"},
    "choice": _SAMPLE_HEAD,
}
TASK_CLASSES = {
    "classification": "ForSequenceClassification",
    "span": "ForQuestionAnswering",
    "choice": "ForMultipleChoice",
}


class HeadPlacement(NamedTuple):
    """Names of the LayerNorms, and of the `transformers` classes, of one placement of LayerNorm."""

    top: Mapping[str, str]
    per_layer: Mapping[str, str]
    prefix: str  # of the names of their classes


PLACEMENTS = {
    "post": HeadPlacement(
        {"embedding.norm": "bert.embeddings.LayerNorm"},
        {
            "attention_norm": "attention.output.LayerNorm",
            "mlp_norm": "output.LayerNorm",
        },
        "Bert",
    ),
    "pre": HeadPlacement(
        {"final_norm": "bert.encoder.ln"},
        {"attention_norm": "attention.ln", "mlp_norm": "ln"},
        "MegatronBert",
    ),
}

# Copies of tied tensors, and buffers in old checkpoints.
TIED = {
    "cls.predictions.decoder.weight": PARAMETERS["word.weight"],
    "cls.predictions.decoder.bias": DECODER_BIAS.theirs[0],
}
BUFFERS = frozenset({"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"})


def _fuse(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Join query, key and value, each (heads x D, ...), to (heads x 3 x D, ...)."""
    by_head = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
    return torch.stack(by_head, dim=1).reshape(-1, *parts[0].shape[1:])


def _split(fused: Tensor, heads: int) -> Sequence[Tensor]:
    """Split (heads x 3 x D, ...) into query, key and value, each (heads x D, ...)."""
    by_part = fused.view(heads, 3, -1, *fused.shape[1:]).unbind(1)
    return [part.reshape(-1, *fused.shape[1:]) for part in by_part]


QKV = Form(to_theirs=_split, to_ours=_fuse)


def name_map(model: Model) -> Iterator[NameEntry]:
    """Yield an entry for every parameter of the model; our fused QKV has three names of theirs."""
    placement = PLACEMENTS[model.layer_norm]
    yield from (NameEntry(ours, (theirs,)) for ours, theirs in PARAMETERS.items())
    parts = [("", "", placement.top)]
    for i in range(model.layers):
        here = f"layers.{0 if model.shared_layers else i}."
        there = f"bert.encoder.layer.{i}."
        parts.append((here, there, {**PER_LAYER, **placement.per_layer}))
    heads = TASK_HEADS.get(model.task_head, MASKED_HEAD)
    parts.append(("", "", heads))
    if model.task_head == "none" and model.sentence_head != "none":
        parts.append(("", "", SENTENCE_HEAD))
    for here, there, modules in parts:
        for ours, theirs in modules.items():
            form = QKV if " " in theirs else SAME
            for leaf in ("weight", "bias"):
                names = tuple(f"{there}{name}.{leaf}" for name in theirs.split())
                yield NameEntry(f"{here}{ours}.{leaf}", names, form)
    if model.task_head == "none":
        yield DECODER_BIAS


def _rename(stored: str) -> str | None:
    """Return the name in the class with all heads; None for a buffer.

    Takes a bare `BertModel` (no prefix) and TensorFlow's gamma and beta of LayerNorm.
    """
    name = stored
    if not stored.startswith(("bert.", "cls.", "classifier.", "qa_outputs.")):
        name = f"bert.{stored}"
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )
    return None if name in BUFFERS else name


def class_name(model: Model) -> str:
    """Return the name of the `transformers` class of the model with its heads."""
    heads = "ForMaskedLM" if model.sentence_head == "none" else "ForPreTraining"
    heads = TASK_CLASSES.get(model.task_head, heads)
    return PLACEMENTS[model.layer_norm].prefix + heads


def config(
    model: Model,
    positions: int,
    dropout: Dropout = NO_DROPOUT,
    tokenizer: transformers.PreTrainedTokenizerBase | None = None,
) -> transformers.PretrainedConfig:
    """Return the `BertConfig` or `MegatronBertConfig` of the model."""
    pad = tokenizer.pad_token_id if tokenizer else 0
    labels = model.head_classes if model.task_head == "classification" else 2
    # a class by its name is Any
    return getattr(transformers, PLACEMENTS[model.layer_norm].prefix + "Config")(  # type: ignore[no-any-return]
        vocab_size=model.vocab_size,
        max_position_embeddings=positions,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=4 * model.hidden,
        hidden_act="gelu",
        layer_norm_eps=BERT_NORM_EPS,
        type_vocab_size=2,
        pad_token_id=pad or 0,
        num_labels=labels,
        hidden_dropout_prob=dropout.hidden,
        attention_probs_dropout_prob=dropout.attention,
        tie_word_embeddings=True,
    )


def logits(model: Any, tokens: Tensor, token_types: Tensor, mask: Tensor) -> Logits:
    """Return the logits of every token that is not padding and of a sentence head."""
    outcome = model(
        input_ids=tokens, attention_mask=mask.long(), token_type_ids=token_types
    )
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
_TASK_USAGE = """\
from transformers import {kind}, AutoTokenizer
model = {kind}.from_pretrained("{{directory}}")
tokenizer = AutoTokenizer.from_pretrained("{{directory}}")
print(model(**tokenizer({{prompt}}, return_tensors="pt")))"""
TASK_USAGE = {
    head: _TASK_USAGE.format(kind=f"AutoModel{name}")
    for head, name in TASK_CLASSES.items()
}
CONVERSION = Conversion(class_name, config, name_map, _rename, TIED, logits, USAGE)
