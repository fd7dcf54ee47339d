"""Arithmetic of a GPT-2 or BERT: parameters, floating-point operations and bytes, from the recipe's shape alone.

Symbols, as in the literature: L layers, h hidden, S tokens per sample, P predicted tokens per sample of a BERT, B samples per
optimizer step, V vocabulary (padded where said), t tensor-parallel degree, N_d data-parallel degree. A multiply-add counts
as two operations.

Imports neither torch nor deepspeed, so that planning is instant and runs anywhere.
"""

from __future__ import annotations

from typing import NamedTuple

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


def tflops(
    model: Model,
    sequence_length: int,
    global_batch: int,
    seconds: float,
    gpus: int,
    *,
    padded_vocab: int,
    checkpointing: bool,
    predictions: int | None = None,
) -> tuple[float, float]:
    """(by the published formula with the model's own size, by exact count): TFLOPS per GPU of a step that took `seconds`."""
    size = parameters(model, sequence_length)
    flops = exact_flops_per_step(
        model, sequence_length, global_batch, padded_vocab=padded_vocab, checkpointing=checkpointing, predictions=predictions
    )
    by_formula = published_tflops(size, sequence_length, global_batch, seconds, gpus, checkpointing=checkpointing)
    return by_formula, exact_tflops(flops, seconds, gpus)


class StateBytes(NamedTuple):
    """Where the model states of one process lie, in bytes."""

    gpu: float
    host: float
    nvme: float


def model_state_bytes(parameters: float, zero_stage: int, dp: int, *, mixed_precision: bool = True) -> float:
    """Bytes of weights, gradients and Adam's states on one data-parallel rank between steps, nothing offloaded.

    Rajbhandari et al., arXiv 1910.02054, section 3.1: mixed precision keeps 2 bytes of weight, 2 of gradient and K = 12
    of optimizer states (fp32 weight, momentum, variance) per parameter; fp32 keeps 4, 4 and 8 (the weight is its own
    master), and under DeepSpeed's ZeRO 4, 4 and 12, since its optimizer steps a copy of the weights in fp32 as well. ZeRO stage 1
    divides the optimizer states by N_d, stage 2 the gradients too, stage 3 the weights too.
    """
    weights, gradients, optimizer, _ = _kinds(parameters, zero_stage, dp, mixed_precision)
    return weights + gradients + optimizer


def placed_state_bytes(
    parameters: float,
    zero_stage: int,
    dp: int,
    *,
    mixed_precision: bool = True,
    optimizer: str = "gpu",
    weights: str = "gpu",
    accumulates: bool = False,
    sub_group: float = 1e9,
) -> StateBytes:
    """The same where it lies at the fullest moment of a step, which is when Adam gets its gradients in fp32.

    Nothing offloaded: ZeRO-0 in half precision holds all gradients in fp32 until the step is done (launch/data_parallel.py), in
    place of those in half precision: 18 bytes per parameter. Stages 1 and 2 replace those of the rank's partition: w + max(g, 4 / N_d) +
    12 / N_d. Stage 3 adds them for one sub-group of `sub_group` elements after the other.

    Optimizer offloaded (ZeRO-Offload, arXiv 2101.06840, section 4; DeepSpeed 0.19.8): the host holds the partition's 12 bytes of optimizer
    states and 4 of fp32 gradients, 16, which is what deepspeed's estimate_zero2_model_states_mem_needs counts. The code holds one more
    copy of the partition in the precision of training, which makes 18: stages 1 and 2 (stage_1_and_2.py) of the weights on their way to
    the GPU, and with gradient accumulation of the gradients as well; stage 3 (stage3.py) of the gradients. On the GPU stay the weights.
    On NVMe lie the 16 bytes, that copy stays on the host. Staging buffers of a bucket or of a parameter come on top.

    Args:
        optimizer, weights: where the optimizer states with the step, and the weights of stage 3, lie: gpu, host or nvme.
        accumulates: more than one micro-batch per step.
        sub_group: zero_optimization.sub_group_size, elements.
    """
    assert optimizer == "gpu" or zero_stage >= 1, "only sharded optimizer states are offloaded"
    assert weights == "gpu" or zero_stage == 3, "only sharded weights are offloaded"
    weight, gradient, states, element = _kinds(parameters, zero_stage, dp, mixed_precision)
    share = parameters / dp if zero_stage else parameters
    at = dict.fromkeys(StateBytes._fields, 0.0)
    at[weights] += weight
    if optimizer != "gpu":
        at[optimizer] += states + 4 * share
        at["host"] += element * share * (2 if accumulates and zero_stage < 3 else 1)
        at["gpu"] += gradient if zero_stage == 1 else 0.0
    elif zero_stage == 3:
        at["gpu"] += states + gradient + 4 * min(share, sub_group)
    else:
        at["gpu"] += states + max(gradient, 4 * share)
    return StateBytes(**at)


def _kinds(parameters: float, zero_stage: int, dp: int, mixed_precision: bool) -> tuple[float, float, float, int]:
    """Bytes of one rank's weights, gradients and optimizer states, and bytes of one number in the precision of training."""
    assert zero_stage in (0, 1, 2, 3), f"no such ZeRO stage: {zero_stage}"
    element = 2 if mixed_precision else 4
    optimizer = 12 if mixed_precision or zero_stage else 8
    ranks = [dp if zero_stage >= least else 1 for least in (3, 2, 1)]
    weights, gradients, states = (parameters * size / n for size, n in zip((element, element, optimizer), ranks, strict=True))
    return weights, gradients, states, element
