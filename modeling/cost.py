"""Arithmetic of a GPT-2 or BERT: parameters, floating-point operations and bytes, from the recipe's shape alone.

Symbols, as in the literature: L layers, h hidden, S tokens per sample, P predicted tokens per sample of a BERT, B samples per
optimizer step, V vocabulary (padded where said), t tensor-parallel degree, N_d data-parallel degree. A multiply-add counts
as two operations.

Imports neither torch nor deepspeed, so that planning is instant and runs anywhere.
"""

from __future__ import annotations

from recipes.schema import Model

TOKEN_TYPES = 2  # BERT's segments A and B
SENTENCE_CLASSES = 2  # of BERT's sentence head


def parameters(model: Model, sequence_length: int, padded_vocab: int | None = None) -> int:
    """Parameters of the whole model, each counted once.

    GPT-2: V h + S h + L (12 h^2 + 13 h) + 2 h: token and position embeddings (the output layer is tied to the first), per
    layer 12 h^2 weights and 13 h biases and LayerNorm parameters, and the final LayerNorm.
    BERT: V (h + 1) + S h + L (12 h^2 + 13 h) + 2 h + 2 h + (h^2 + h + 2 h) + (h^2 + h + 2 h + 2): beside these two token types,
    the decoder's bias, the dense and LayerNorm of the masked-token head, and unless sentence_head is none the pooler and the
    sentence head. Post-LN has a LayerNorm on the embeddings where pre-LN has one after the last layer: the same number.
    V is `padded_vocab`, or the recipe's vocabulary where None.
    """
    return parameters_per_rank(model, sequence_length, padded_vocab)


def parameters_per_rank(
    model: Model,
    sequence_length: int,
    padded_vocab: int | None = None,
    tp: int = 1,
    *,
    layers: int | None = None,
    first: bool = True,
    last: bool = True,
) -> int:
    """Parameters held by one tensor-parallel rank of one pipeline stage, as Megatron-LM splits (1909.08053, section 3).

    Split over t ranks: the embedding and BERT's decoder bias, QKV and the first MLP matrix with their biases, and the two
    row-parallel weights: (12 h^2 + 7 h) / t per layer. On every rank: positions, token types, LayerNorms, BERT's heads, and the
    row-parallel biases, 6 h per layer. Multiplied by t this is the sum over ranks that Megatron-LM prints as the size of a model.

    `layers` of the stage (None: all), `first` and `last`: whether it is the first stage (embeddings) and the last (final
    LayerNorm, heads, and a copy of the tied embedding unless it is also the first).
    """
    hidden = model.hidden
    vocab = model.vocab_size if padded_vocab is None else padded_vocab
    assert vocab % tp == 0 and hidden % tp == 0, f"vocabulary {vocab} and hidden {hidden} must be divisible by tp={tp}"
    depth = model.layers if layers is None else layers
    total = depth * ((12 * hidden**2 + 7 * hidden) // tp + 6 * hidden)
    if first or last:
        total += vocab // tp * hidden
    if first:
        total += sequence_length * hidden
    if last and model.layer_norm == "pre":
        total += 2 * hidden
    if model.family == "bert":
        if first:
            total += TOKEN_TYPES * hidden + (2 * hidden if model.layer_norm == "post" else 0)
        if last:
            total += vocab // tp + _bert_head_parameters(model)
    return total


def _bert_head_parameters(model: Model) -> int:
    """Of the masked-token head without its decoder, and of the pooler and the sentence head where there is one."""
    hidden = model.hidden
    dense = hidden**2 + hidden
    sentence = dense + SENTENCE_CLASSES * (hidden + 1) if model.sentence_head != "none" else 0
    return dense + 2 * hidden + sentence


def exact_flops_per_step(
    model: Model,
    sequence_length: int,
    global_batch: int,
    *,
    padded_vocab: int | None = None,
    checkpointing: bool = False,
    predictions: int | None = None,
) -> int:
    """Operations of the matrix multiplications of one optimizer step, over all GPUs.

    Forward, per sample and layer: QKV 6 S h^2, scores 2 S^2 h, attention times values 2 S^2 h (the full S x S square,
    as a dense kernel computes it: a causal kernel that skips the upper triangle does about half of these two),
    projection 2 S h^2, MLP 16 S h^2: together 24 S h^2 + 4 S^2 h. Logits of GPT-2: 2 S h V. Backward is twice the forward
    (gradients of inputs and of weights); with activation checkpointing the layers' forward runs once more, the logits'
    does not. Hence
        B (f L (24 S h^2 + 4 S^2 h) + 6 S h V),  f = 3, or 4 with checkpointing,
    which for f = 4 is 96 B S L h^2 (1 + S / 6h + V / 16 L h), the count of Narayanan et al. (arXiv 2104.04473,
    section 5.1 and appendix).
    A banded layer counts the S x S square only inside its band of W keys, `band(S, W)` pairs of a query and a key instead of S^2:
    scores and values together 4 h (W S - W (W - 1) / 2) operations. What a kernel computes beyond, in blocks that the edge of the
    band crosses or under a mask, is no work of the model and is not counted.
    BERT's masked-token head sees only P = `predictions` positions of a sample (None: all S), 2 P h^2 + 2 P h V, and its sentence
    head only the first, 2 h^2 + 4 h. Padding is counted as tokens.
    Embedding look-ups, LayerNorm, GeLU, softmax, dropout and the optimizer are left out, as there.
    """
    hidden, length = model.hidden, sequence_length
    vocab = model.vocab_size if padded_vocab is None else padded_vocab
    pairs = sum(length**2 if window is None else band(length, window) for window in model.windows)
    layers_forward = model.layers * 24 * length * hidden**2 + 4 * pairs * hidden
    if model.family == "bert":
        heads_forward = 2 * (length if predictions is None else predictions) * hidden * (hidden + vocab)
        if model.sentence_head != "none":
            heads_forward += 2 * hidden * (hidden + SENTENCE_CLASSES)
    else:
        heads_forward = 2 * length * hidden * vocab
    passes = 4 if checkpointing else 3
    return global_batch * (passes * layers_forward + 3 * heads_forward)


def band(length: int, window: int) -> int:
    """Pairs (query, key) of a causal band: query i of `length` sees min(i + 1, window) keys."""
    window = min(window, length)
    return window * length - window * (window - 1) // 2


def exact_tflops(flops_per_step: float, seconds: float, gpus: int) -> float:
    """TFLOPS (10^12 operations per second) per GPU from `exact_flops_per_step` and the seconds of an optimizer step."""
    return flops_per_step / (seconds * gpus * 1e12)


def published_tflops(
    parameters: float, sequence_length: int, global_batch: int, seconds: float, gpus: int, *, checkpointing: bool
) -> float:
    """TFLOPS per GPU by the formula of the published tables ("GPT2 Experiments", Jean Zay HPC):

        parameters / 1e9 * 4 * 2 * S * B / (seconds * gpus * 1000)

    Two operations per parameter and token, four passes (forward, recomputed forward, twice for the backward); without
    activation checkpointing three. Attention's S x S products are not counted and embeddings are, as in the source.
    """
    passes = 4 if checkpointing else 3
    return parameters / 1e9 * passes * 2 * sequence_length * global_batch / (seconds * gpus * 1000)


def model_state_bytes(parameters: float, zero_stage: int, dp: int, *, mixed_precision: bool = True) -> float:
    """Bytes of weights, gradients and Adam's states on one data-parallel rank, nothing offloaded.

    Rajbhandari et al., arXiv 1910.02054, section 3.1: mixed precision keeps 2 bytes of weight, 2 of gradient and K = 12
    of optimizer states (fp32 weight, momentum, variance) per parameter; fp32 keeps 4, 4 and 8 (the weight is its own
    master). ZeRO stage 1 divides the optimizer states by N_d, stage 2 the gradients too, stage 3 the weights too.
    """
    assert zero_stage in (0, 1, 2, 3), f"no such ZeRO stage: {zero_stage}"
    weight, gradient, optimizer = (2, 2, 12) if mixed_precision else (4, 4, 8)
    per_parameter = (
        weight / (dp if zero_stage >= 3 else 1)
        + gradient / (dp if zero_stage >= 2 else 1)
        + optimizer / (dp if zero_stage >= 1 else 1)
    )
    return parameters * per_parameter
