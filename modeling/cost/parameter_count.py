"""Parameter counts of a GPT-2 or BERT, in all and per rank, derived symbol by symbol."""

from __future__ import annotations

from recipes.schema import Model

TOKEN_TYPES = 2  # BERT's segments A and B
SENTENCE_CLASSES = 2  # of BERT's sentence head


def head_outputs(model: Model) -> int:
    """Return the number of a task head's logits per sample, or for spans per token (start and end)."""
    return {"classification": model.head_classes, "span": 2, "choice": 1}[
        model.task_head
    ]


def first_stage(model: Model) -> int:
    """Count the first stage's parameters besides words and positions; whole on every tensor rank.

    A BERT has 2 h of token types; post-LN adds the embeddings' LayerNorm, 2 h.
    """
    types = TOKEN_TYPES * model.hidden if model.facts.masked else 0
    return types + (2 * model.hidden if model.layer_norm == "post" else 0)


def last_stage(model: Model, vocab: int) -> int:
    """Count the last stage's parameters besides the final LayerNorm and this rank's `vocab` words.

    A GPT-2 has none: its output layer is the embedding. A BERT has heads and the decoder's bias. The
    masked-token head is dense and LayerNorm, h^2 + h + 2 h; a sentence head has its pooler, h^2 + h, and its
    own weights and biases, 2 (h + 1). A task's head with C outputs replaces them: C (h + 1), and a pooler
    except for spans.
    """
    if not model.facts.masked:
        return 0
    dense = model.hidden**2 + model.hidden
    if model.task_head != "none":
        pooler = 0 if model.task_head == "span" else dense
        return pooler + head_outputs(model) * (model.hidden + 1)
    sentence = (
        dense + SENTENCE_CLASSES * (model.hidden + 1)
        if model.sentence_head != "none"
        else 0
    )
    return vocab + dense + 2 * model.hidden + sentence


def head_operations(
    model: Model, length: int, vocab: int, predictions: int | None
) -> int:
    """Count the operations after the last layer in a sample's forward pass.

    GPT-2: logits at every position, 2 S h V. BERT: dense and decoder at P (None: S) positions,
    2 P h^2 + 2 P h V; sentence head once, 2 h^2 + 4 h.
    """
    if not model.facts.masked:
        return 2 * length * model.hidden * vocab
    if model.task_head == "span":
        return 2 * length * model.hidden * head_outputs(model)
    if model.task_head != "none":
        return 2 * model.hidden * (model.hidden + head_outputs(model))
    masked = (
        2
        * (length if predictions is None else predictions)
        * model.hidden
        * (model.hidden + vocab)
    )
    sentence = 2 * model.hidden * (model.hidden + SENTENCE_CLASSES)
    return masked + (sentence if model.sentence_head != "none" else 0)


def parameters(model: Model, positions: int) -> int:
    """Count the parameters of the whole model, each once.

    GPT-2: V h + S h + L (12 h^2 + 13 h) + 2 h: token and position embeddings (the output layer is tied to the
    first), per layer 12 h^2 weights and 13 h biases and LayerNorm parameters, and the final LayerNorm.
    BERT: V (h + 1) + S h + L (12 h^2 + 13 h) + 2 h + 2 h + (h^2 + h + 2 h) + (h^2 + h + 2 h + 2): in addition
    two token types, the decoder's bias, the dense and LayerNorm of the masked-token head, and unless
    sentence_head is none the pooler and the sentence head. Post-LN has a LayerNorm on the embeddings, pre-LN
    one after the last layer: the same number.
    """
    return parameters_per_rank(model, positions)


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
    """Count the parameters of one tensor rank of one pipeline stage, split as in Megatron-LM.

    See arXiv 1909.08053, section 3.

    Split over t ranks: the embedding and BERT's decoder bias, QKV and the first MLP matrix with their biases,
    and the two row-parallel weights: (12 h^2 + 7 h) / t per layer. On every rank: positions, token types,
    LayerNorms, BERT's heads, and the row-parallel biases, 6 h per layer. Multiplied by t this is the sum over
    ranks that Megatron-LM prints as the size of a model.

    Shared layers count once in each stage. `layers`: of the stage (None: all). `first`: it is the first stage
    (embeddings). `last`: it is the last (final LayerNorm, heads, and a copy of the tied embedding unless it
    is also the first). A model by its config is counted by torch: it is never split.
    """
    if model.config:
        from modeling.formats.huggingface import counting

        return counting.parameters(model)
    hidden = model.hidden
    vocab = model.vocab_size if padded_vocab is None else padded_vocab
    assert vocab % tp == 0 and hidden % tp == 0, (
        f"vocabulary {vocab} and hidden {hidden} must be divisible by tp={tp}"
    )
    if layers is None:
        layers = model.layers
    depth = model.different_layers(layers)
    total = depth * ((12 * hidden**2 + 7 * hidden) // tp + 6 * hidden)
    if first or last:
        total += vocab // tp * hidden
    if first:
        total += positions * hidden + first_stage(model)
    if last:
        total += last_stage(model, vocab // tp)
        if model.layer_norm == "pre":
            total += 2 * hidden
    return total


# What Muon steps (launch/deepspeed_fixes/muon.py)


def is_hidden_matrix(name: str, dimensions: int) -> bool:
    """Check whether a parameter of this canonical name is a matrix of a transformer layer."""
    return dimensions == 2 and name.startswith("layers.")


def hidden_matrices(model: Model, layers: int, tp: int) -> int:
    """Count the parameters of the matrices of `layers` layers on one tensor rank, 12 h^2 / t a layer."""
    return model.different_layers(layers) * 12 * model.hidden**2 // tp
