"""What each family adds to a transformer's counts besides words, positions and layers.

h hidden, V vocabulary, S tokens per sample, P predicted tokens per sample.
"""

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
