"""Parameters of a GPT-2 or BERT, in all and per rank, derived symbol by symbol."""

from __future__ import annotations

from modeling.cost.families import first_stage, last_stage
from recipes.schema import Model


def parameters(model: Model, positions: int, padded_vocab: int | None = None) -> int:
    """Parameters of the whole model, each counted once.

    GPT-2: V h + S h + L (12 h^2 + 13 h) + 2 h: token and position embeddings (the output layer is tied to the
    first), per layer 12 h^2 weights and 13 h biases and LayerNorm parameters, and the final LayerNorm.
    BERT: V (h + 1) + S h + L (12 h^2 + 13 h) + 2 h + 2 h + (h^2 + h + 2 h) + (h^2 + h + 2 h + 2): beside
    these two token types, the decoder's bias, the dense and LayerNorm of the masked-token head, and unless
    sentence_head is none the pooler and the sentence head. Post-LN has a LayerNorm on the embeddings where
    pre-LN has one after the last layer: the same number. V is `padded_vocab`, or the recipe's vocabulary
    where None.
    """
    return parameters_per_rank(model, positions, padded_vocab)


def parameters_per_rank(
    model: Model,
    positions: int,
    padded_vocab: int | None = None,
    tp: int = 1,
    *,
    layers: int | None = None,
    first: bool = True,
    last: bool = True,
) -> int:
    """Parameters held by one tensor-parallel rank of one pipeline stage, as Megatron-LM splits.

    See arXiv 1909.08053, section 3.

    Split over t ranks: the embedding and BERT's decoder bias, QKV and the first MLP matrix with their biases,
    and the two row-parallel weights: (12 h^2 + 7 h) / t per layer. On every rank: positions, token types,
    LayerNorms, BERT's heads, and the row-parallel biases, 6 h per layer. Multiplied by t this is the sum over
    ranks that Megatron-LM prints as the size of a model.

    `layers` of the stage (None: all), `first` and `last`: whether it is the first stage (embeddings) and the
    last (final LayerNorm, heads, and a copy of the tied embedding unless it is also the first).
    """
    hidden = model.hidden
    vocab = model.vocab_size if padded_vocab is None else padded_vocab
    assert vocab % tp == 0 and hidden % tp == 0, (
        f"vocabulary {vocab} and hidden {hidden} must be divisible by tp={tp}"
    )
    depth = model.layers if layers is None else layers
    total = depth * ((12 * hidden**2 + 7 * hidden) // tp + 6 * hidden)
    if first or last:
        total += vocab // tp * hidden
    if first:
        total += positions * hidden + first_stage(model)
    if last:
        total += (2 * hidden if model.layer_norm == "pre" else 0) + last_stage(model, vocab // tp)
    return total
