"""Conversion between our canonical BERT weights and `transformers`', by one name map for each placement of LayerNorm.

Post-LN is `BertForPreTraining`, pre-LN `MegatronBertForPreTraining`; without a sentence head `BertForMaskedLM` and
`MegatronBertForMaskedLM`. Beside names one thing differs: they hold query, key and value apart, each (heads x D, H); we hold
one matrix with rows (head, q/k/v, D), so that a tensor-parallel slice holds whole heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from modeling.huggingface.names import Tensors, check_names
from recipes.schema import Model

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
QKV = ("attention.qkv", ("attention.self.query", "attention.self.key", "attention.self.value"))
MASKED_HEAD = {
    "head.transform": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
}
SENTENCE_HEAD = {"head.pooler": "bert.pooler.dense", "head.sentence": "cls.seq_relationship"}
DECODER_BIAS = ("decoder_bias.bias", "cls.predictions.bias")


@dataclass(frozen=True)
class Placement:
    """Where a placement of LayerNorm has its norms, and what `transformers` calls the model."""

    top: Mapping[str, str]
    per_layer: Mapping[str, str]
    family: str  # prefix of their classes


PLACEMENTS = {
    "post": Placement(
        {"embedding.norm": "bert.embeddings.LayerNorm"},
        {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
        "Bert",
    ),
    "pre": Placement(
        {"final_norm": "bert.encoder.ln"},
        {"attention_norm": "attention.ln", "mlp_norm": "ln"},
        "MegatronBert",
    ),
}

# Copies of tied tensors, and a buffer that old checkpoints stored.
TIED = {
    "cls.predictions.decoder.weight": PARAMETERS["word.weight"],
    "cls.predictions.decoder.bias": DECODER_BIAS[1],
}
BUFFERS = frozenset({"bert.embeddings.position_ids", "bert.embeddings.token_type_ids"})


def name_map(model: Model) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(our name, their names) of every parameter; three of theirs where ours is fused."""
    placement = PLACEMENTS[model.layer_norm]
    yield from ((ours, (theirs,)) for ours, theirs in PARAMETERS.items())
    modules = [(ours, (theirs,)) for ours, theirs in placement.top.items()]
    per_layer = [
        QKV,
        *((ours, (theirs,)) for ours, theirs in (PER_LAYER | dict(placement.per_layer)).items()),
    ]
    for i in range(model.layers):
        modules += [
            (f"layers.{i}.{ours}", tuple(f"bert.encoder.layer.{i}.{name}" for name in theirs))
            for ours, theirs in per_layer
        ]
    for ours, theirs in (*modules, *head_modules(model)):
        for leaf in ("weight", "bias"):
            yield f"{ours}.{leaf}", tuple(f"{name}.{leaf}" for name in theirs)
    yield DECODER_BIAS[0], (DECODER_BIAS[1],)


def head_modules(model: Model) -> list[tuple[str, tuple[str, ...]]]:
    """Modules of the masked-token head, and of the sentence head where the model has one."""
    heads = MASKED_HEAD | (SENTENCE_HEAD if model.sentence_head != "none" else {})
    return [(ours, (theirs,)) for ours, theirs in heads.items()]


def _fuse(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """Query, key and value, each (heads x D, ...), -> (heads x 3 x D, ...)."""
    return torch.stack([part.reshape(heads, -1, *part.shape[1:]) for part in parts], dim=1).reshape(
        -1, *parts[0].shape[1:]
    )


def _part(fused: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """(heads x 3 x D, ...) -> query, key and value, each (heads x D, ...)."""
    return tuple(
        part.reshape(-1, *fused.shape[1:]) for part in fused.view(heads, 3, -1, *fused.shape[1:]).unbind(1)
    )


def to_hf(ours: Tensors, model: Model) -> dict[str, torch.Tensor]:
    """Canonical weights -> the state dict of the `transformers` class that `hf_class` gives, tied copies left out.

    Raises ValueError naming missing and unexpected tensors.
    """
    names = dict(name_map(model))
    check_names(set(ours), set(names), "canonical weights")
    theirs: dict[str, torch.Tensor] = {}
    for name, targets in names.items():
        parts = _part(ours[name], model.heads) if len(targets) == 3 else (ours[name],)
        theirs |= {target: part.contiguous() for target, part in zip(targets, parts, strict=True)}
    return theirs


def from_hf(theirs: Tensors, model: Model, *, allow_missing_heads: bool = False) -> dict[str, torch.Tensor]:
    """The state dict of a `transformers` BERT of this placement, with or without heads, -> canonical float32 weights.

    A pooler and a sentence head are left out where the model has none. `allow_missing_heads`: parameters of heads that
    the weights lack (those of a `BertModel`) are missing in the result as well, for the caller to fill in.

    Raises ValueError naming missing and unexpected tensors, or where the decoder is not tied to the embedding.
    """
    found = _canonical_names(theirs)
    if model.sentence_head == "none":
        unused = tuple(f"{name}." for name in SENTENCE_HEAD.values())
        found = {name: tensor for name, tensor in found.items() if not name.startswith(unused)}
    names = dict(name_map(model))
    missing_heads = [
        ours
        for ours, sources in names.items()
        if _of_heads(ours) and not any(source in found for source in sources)
    ]
    if missing_heads and not allow_missing_heads and not any(name.startswith("cls.") for name in found):
        raise ValueError(
            f"transformers weights without heads ({', '.join(missing_heads[:4])}, ... are missing): pretraining goes on from a "
            f"{hf_class_name(model)}; a bare {PLACEMENTS[model.layer_norm].family}Model has no head to predict tokens with"
        )
    if allow_missing_heads:
        for ours in missing_heads:
            del names[ours]
    expected = {source for sources in names.values() for source in sources}
    check_names(
        set(found),
        expected,
        "transformers weights",
        "model.layers, model.family, model.layer_norm and model.sentence_head",
    )
    parts = {ours: [found[source].float() for source in sources] for ours, sources in names.items()}
    return {ours: (_fuse(p, model.heads) if len(p) == 3 else p[0]).contiguous() for ours, p in parts.items()}


def _of_heads(ours: str) -> bool:
    return ours.startswith(("head.", "decoder_bias."))


def _canonical_names(theirs: Tensors) -> dict[str, torch.Tensor]:
    """Their tensors under the names of `BertForPreTraining`, each once.

    Handles a bare `BertModel` (no prefix), LayerNorm's gamma and beta of checkpoints made from TensorFlow's, and tied copies.
    """
    found = {}
    for name, tensor in theirs.items():
        name = name if name.startswith(("bert.", "cls.")) else f"bert.{name}"
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if name not in BUFFERS:
            found[name] = tensor
    for copy, original in TIED.items():
        if (tied := found.pop(copy, None)) is None:
            continue
        if not torch.equal(found.setdefault(original, tied), tied):
            raise ValueError(
                f"transformers weights have a {copy} of its own: in our BERT it is the same tensor as {original}"
            )
    return found


def hf_class_name(model: Model) -> str:
    """Name of the `transformers` class that holds the model."""
    return PLACEMENTS[model.layer_norm].family + (
        "ForMaskedLM" if model.sentence_head == "none" else "ForPreTraining"
    )


def hf_class(model: Model) -> type:
    import transformers

    return getattr(transformers, hf_class_name(model))


def hf_config(
    model: Model,
    *,
    positions: int,
    hidden_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    pad_token: int = 0,
) -> Any:
    """The `BertConfig` or `MegatronBertConfig` of the same model."""
    import transformers

    kind = getattr(transformers, PLACEMENTS[model.layer_norm].family + "Config")
    return kind(
        vocab_size=model.vocab_size, max_position_embeddings=positions, hidden_size=model.hidden, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, intermediate_size=4 * model.hidden, hidden_act="gelu", layer_norm_eps=1e-12,
        type_vocab_size=2, hidden_dropout_prob=hidden_dropout, attention_probs_dropout_prob=attention_dropout,
        pad_token_id=pad_token, tie_word_embeddings=True,
    )  # fmt: skip
