"""Floating-point operations of an optimizer step, and pipeline stages that take equal shares of them."""

from __future__ import annotations

from functools import lru_cache

from modeling.cost.parameter_count import head_operations, parameters
from recipes.families import Fixed, Window
from recipes.schema import Model, Recipe


def exact_flops_per_step(
    model: Model,
    sequence_length: int,
    global_batch: int,
    *,
    padded_vocab: int | None = None,
    checkpointing: bool = False,
    predictions: int | None = None,
) -> int:
    """Count the operations of the matrix products of one optimizer step, over all GPUs.

    Forward, per sample and layer: QKV 6 S h^2, scores 2 S^2 h, attention times values 2 S^2 h (the full S x S
    square, as a dense kernel computes it: a causal kernel that skips the upper triangle does about half of
    these two), projection 2 S h^2, MLP 16 S h^2: together 24 S h^2 + 4 S^2 h. Logits of GPT-2: 2 S h V.
    Backward is twice the forward (gradients of inputs and of weights); with activation checkpointing the
    layers' forward runs once more, the logits' does not. Hence
        B (f L (24 S h^2 + 4 S^2 h) + 6 S h V),  f = 3, or 4 with checkpointing,
    which for f = 4 is 96 B S L h^2 (1 + S / 6h + V / 16 L h), the count of Narayanan et al. (arXiv
    2104.04473, section 5.1 and appendix).
    With borders of documents (data.attend) the square is counted all the same, as in windows.
    A banded or fixed layer counts the pairs of a query and a key inside its pattern, `pairs`, instead of S^2:
    a kernel's further operations, in blocks on the edge of a band or under a mask, are not counted. BERT's
    own heads replace 2 S h V; they see only P = `predictions` positions of a sample
    (`modeling.cost.parameter_count`). A question is a sequence for each of its choices. Padding is counted as
    tokens. Embedding look-ups, LayerNorm, GeLU, softmax, dropout and the optimizer are left out, as in that
    paper. A model by its config is counted by torch; 0: it cannot be.
    """
    if model.config:
        from modeling.formats.huggingface import counting

        return global_batch * counting.operations(
            model, sequence_length, again=checkpointing
        )
    hidden = model.hidden
    length = sequence_length
    vocab = model.vocab_size if padded_vocab is None else padded_vocab
    scores = sum(pairs(length, window) for window in model.windows)
    layers_forward = model.layers * 24 * length * hidden**2 + 4 * scores * hidden
    heads_forward = head_operations(model, length, vocab, predictions)
    passes = 4 if checkpointing else 3
    return (
        global_batch * model.sequences * (passes * layers_forward + 3 * heads_forward)
    )


def operations_of(recipe: Recipe, samples: int, padded_vocab: int) -> int:
    """Count the operations of `samples` samples in a recipe's training, as `exact_flops_per_step` does."""
    return exact_flops_per_step(
        recipe.model,
        recipe.sequence_length,
        samples,
        padded_vocab=padded_vocab,
        checkpointing=recipe.checkpoint_interval > 0,
        predictions=recipe.predictions,
    )


def pairs(length: int, window: Window) -> int:
    """Count the pairs of a query and a key that a layer multiplies for `length` positions.

    Dense: the square. A band: query i sees min(i + 1, W) keys. Fixed: those of its window up to itself, and
    the G columns of every window before.
    """
    if window is None:
        return length**2
    if isinstance(window, Fixed):
        size = window.window
        whole, rest = divmod(length, size)
        own = whole * size * (size + 1) + rest * (rest + 1)
        return own // 2 + window.columns * (
            size * whole * (whole - 1) // 2 + whole * rest
        )
    window = min(window, length)
    return window * length - window * (window - 1) // 2


def exact_tflops(flops_per_step: float, seconds: float, gpus: int) -> float:
    """Return TFLOPS (10^12 operations per second) per GPU from the count of `exact_flops_per_step`."""
    return flops_per_step / (seconds * gpus * 1e12)


def published_tflops(
    parameters: float,
    length: int,
    batch: int,
    seconds: float,
    gpus: int,
    *,
    checkpointing: bool,
) -> float:
    """Return TFLOPS per GPU by the formula of the published tables, "GPT2 Experiments" (Jean Zay HPC).

        parameters / 1e9 * 4 * 2 * S * B / (seconds * gpus * 1000)

    Two operations per parameter and token, four passes (forward, recomputed forward, twice for the backward);
    without activation checkpointing three. Attention's S x S products are not counted and embeddings are, as
    in the source.
    """
    passes = 4 if checkpointing else 3
    return parameters / 1e9 * passes * 2 * length * batch / (seconds * gpus * 1000)


def tflops(
    recipe: Recipe, padded_vocab: int, samples: int, seconds: float, gpus: int
) -> tuple[float | None, float | None]:
    """Return TFLOPS per GPU of a step: by the published formula with the model's own size, by exact count.

    None: there is no formula for a model by its config, and its operations may be uncountable.
    """
    operations = operations_of(recipe, samples, padded_vocab)
    exact = exact_tflops(operations, seconds, gpus)
    if recipe.model.config:
        return None, exact or None
    length = recipe.sequence_length
    again = recipe.checkpoint_interval > 0
    size = parameters(recipe.model.unshared, length)  # each use of a layer multiplies
    read = samples * recipe.model.sequences
    by_formula = published_tflops(
        size, length, read, seconds, gpus, checkpointing=again
    )
    return by_formula, exact


# Numbers of transformer layers of the pipeline stages


def stages_of(recipe: Recipe, padded_vocab: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage of a recipe's model in training."""
    recomputed = recipe.checkpoint_interval > 0
    predictions = recipe.predictions if recipe.model.facts.masked else None
    return stages_by_time(
        recipe.model, recipe.sequence_length, padded_vocab, predictions, recomputed, pp
    )


@lru_cache(maxsize=1024)  # a search of layouts calls it ten times for each
def stages_by_time(
    model: Model,
    length: int,
    padded_vocab: int,
    predictions: int | None,
    recomputed: bool,
    pp: int,
) -> tuple[int, ...]:
    """Return the layers of each stage, balanced with the output layer's time from `head_in_layers`."""
    if pp == 1:
        return (model.layers,)
    head = head_in_layers(model, length, padded_vocab, predictions, recomputed)
    return tuple(balanced_stages(model.layers, pp, head))


def equal_stages(layers: int, pp: int) -> list[int]:
    """Split the layers as equally as possible; the first stages have one more."""
    each, over = divmod(layers, pp)
    return [each + (stage < over) for stage in range(pp)]


def balanced_stages(layers: int, pp: int, head: float) -> list[int]:
    """Split the layers so that the slowest stage takes least time.

    `head`: time of the output layer, in layers. The stages before the last share the rest equally. Among
    splits with the same time the most equal one is taken; every stage has a layer. `pp`: 2 or more.
    """

    def split(last: int) -> list[int]:
        return [*equal_stages(layers - last, pp - 1), last]

    most = min(layers // pp, layers - (pp - 1))
    splits = [split(last) for last in range(most, 0, -1)]
    return min(splits, key=lambda stages: max(stages[0], stages[-1] + head))


def head_in_layers(
    model: Model,
    length: int,
    padded_vocab: int,
    predictions: int | None,
    recomputed: bool,
) -> float:
    """Return the output layer's time in layers' times, by the count of `exact_flops_per_step`."""
    scores = sum(pairs(length, window) for window in model.windows) / model.layers
    layer = 24 * length * model.hidden**2 + 4 * model.hidden * scores
    head = head_operations(model, length, padded_vocab, predictions)
    return 3 * head / ((4 if recomputed else 3) * layer)
