"""Matrix products of a model's forward pass with their shapes, which planning and benchmarks time."""

from __future__ import annotations

from typing import NamedTuple

from modeling.cost.operation_count import pairs
from recipes.families import Window
from recipes.schema import Model

# Products (h, h) x (h, h) of Muon's step for a layer: each of 5 iterations takes 4 m^2 n + 2 m^3 operations for
# a matrix (m, n), m <= n; 6 h^3 each for queries, keys, values and the projection, 18 h^3 for each MLP matrix.
OF_MUON = 5 * (4 * 6 + 2 * 18) // 2
OF_LARGEST_MATRIX = 5 * 18 // 2


class Product(NamedTuple):
    """`times` products of an (m, k) and a (k, n) matrix; 2 m n k operations each."""

    m: float
    n: float
    k: float
    times: float = 1

    @property
    def operations(self) -> float:
        return 2 * self.m * self.n * self.k * self.times


def layer_products(model: Model, tokens: int, tp: int = 1) -> tuple[Product, ...]:
    """Return the products with weights in a layer's forward pass, cut as in Megatron-LM: 24 b S h^2 / t.

    tokens: b S of a micro-batch. Their sum with `attention_products` is the count of `exact_flops_per_step`.
    """
    hidden = model.hidden
    return (
        Product(tokens, 3 * hidden / tp, hidden),
        Product(tokens, hidden, hidden / tp),
        Product(tokens, 4 * hidden / tp, hidden),
        Product(tokens, hidden, 4 * hidden / tp),
    )


def attention_products(
    model: Model, tokens: int, length: int, tp: int, window: Window = None
) -> tuple[Product, ...]:
    """Return the products of scores and values in a layer, one for each head and sample: 4 b S^2 h / t.

    A sparse layer's share of the square is `pairs(S, window)`.
    """
    head = model.hidden / model.heads
    keys = pairs(length, window) / length
    count = model.heads / tp * tokens / length
    return Product(length, keys, head, count), Product(length, head, keys, count)


def head_products(
    model: Model,
    samples: int,
    length: int,
    padded_vocab: int,
    tp: int,
    predictions: int | None,
) -> tuple[Product, ...]:
    """Return the products after the last layer: logits at every position, a BERT's at its P predicted ones.

    BERT's masked-token head has a dense layer before its logits, on every tensor rank. Its sentence head, two
    products of b rows, is left out, and so is a task's head with its few outputs.
    """
    if model.task_head != "none":
        return ()
    rows = samples * (length if predictions is None else predictions)
    logits = Product(rows, padded_vocab / tp, model.hidden)
    return (
        (Product(rows, model.hidden, model.hidden), logits)
        if model.facts.masked
        else (logits,)
    )
