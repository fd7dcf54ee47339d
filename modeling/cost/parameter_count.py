"""Parameters of a GPT-2 or BERT, in all and per rank, derived symbol by symbol."""

from __future__ import annotations

from recipes.schema import Model

TOKEN_TYPES = 2  # BERT's segments A and B
SENTENCE_CLASSES = 2  # of BERT's sentence head


def head_outputs(model: Model) -> int:
    """Logits of a head for a task, of a sample or, for spans, of a token: where one begins and ends."""
    return {"classification": model.head_classes, "span": 2, "choice": 1}[model.task_head]


def first_stage(model: Model) -> int:
    """Parameters of the first stage besides words and positions; whole on every tensor rank.

    Of a BERT 2 h of token types; post-LN has its LayerNorm, 2 h, on the embeddings.
    """
    types = TOKEN_TYPES * model.hidden if model.facts.masked else 0
    return types + (2 * model.hidden if model.layer_norm == "post" else 0)


def last_stage(model: Model, vocab: int) -> int:
    """Parameters of the last stage besides the final LayerNorm and this rank's `vocab` words.

    Of a GPT-2 none: its output layer is the embedding. A BERT has heads and the decoder's bias. The
    masked-token head is dense and LayerNorm, h^2 + h + 2 h; a sentence head has its pooler, h^2 + h, and its
    own weights and biases, 2 (h + 1). In their place a head for a task with C outputs has C (h + 1), and but
    for spans a pooler.
    """
    if not model.facts.masked:
        return 0
    dense = model.hidden**2 + model.hidden
    if model.task_head != "none":
        pooler = 0 if model.task_head == "span" else dense
        return pooler + head_outputs(model) * (model.hidden + 1)
    sentence = dense + SENTENCE_CLASSES * (model.hidden + 1) if model.sentence_head != "none" else 0
    return vocab + dense + 2 * model.hidden + sentence


def head_operations(model: Model, length: int, vocab: int, predictions: int | None) -> int:
    """Operations after the last layer in a sample's forward pass.

    Of a GPT-2 logits at every position, 2 S h V. Of a BERT at P (None: S) positions dense and decoder,
    2 P h^2 + 2 P h V; sentence head once, 2 h^2 + 4 h.
    """
    if not model.facts.masked:
        return 2 * length * model.hidden * vocab
    if model.task_head == "span":
        return 2 * length * model.hidden * head_outputs(model)
    if model.task_head != "none":
        return 2 * model.hidden * (model.hidden + head_outputs(model))
    masked = 2 * (length if predictions is None else predictions) * model.hidden * (model.hidden + vocab)
    sentence = 2 * model.hidden * (model.hidden + SENTENCE_CLASSES)
    return masked + (sentence if model.sentence_head != "none" else 0)


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
