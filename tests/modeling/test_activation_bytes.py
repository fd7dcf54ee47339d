"""Bytes of activations and shapes of products, against the papers and against the operation count."""

import pytest

from modeling import cost
from modeling.cost import products
from modeling.cost.activation_bytes import LayerActivations
from recipes.schema import Dropout, Model

DROPPED = Dropout(hidden=0.1, attention=0.1)
S, B, H, HEADS = 2048, 4, 6144, 64
MODEL = Model(layers=48, hidden=H, heads=HEADS, vocab_size=51200)


def kept(tp: int = 1, **how) -> float:
    how = {"keeps_scores": True, "dropout": DROPPED, "width": 2, **how}
    return LayerActivations(model=MODEL, tokens=S * B, length=S, tp=tp, **how).kept


def test_a_layer_keeps_what_korthikanti_et_al_count():
    """arXiv 2205.05198, table 2: no parallelism, tensor, tensor and sequence, and selective recomputation."""
    whole, scores = S * B * H, 5 * HEADS * S / H
    assert kept() == pytest.approx(whole * (34 + scores))
    assert kept(8) == pytest.approx(whole * (10 + 24 / 8 + scores / 8))
    assert kept(8, sequence_parallel=True) == pytest.approx(whole * (34 + scores) / 8)
    assert kept(8, sequence_parallel=True, keeps_scores=False) == pytest.approx(whole * 34 / 8)
    layer = LayerActivations(MODEL, DROPPED, S * B, S, 2, 8, keeps_scores=True)
    assert layer.kept - layer.kept_scores == pytest.approx(whole * (10 + 24 / 8))
    assert layer.stream == 2 * whole, "what full recomputation keeps: 2 sbh"


def test_masks_are_kept_where_something_is_dropped():
    whole = S * B * H
    assert kept(dropout=Dropout(), keeps_scores=False) == 32 * whole
    assert kept(dropout=Dropout(attention=0.1)) - kept(dropout=Dropout()) == 3 * HEADS * S * S * B
    assert kept(dropout=Dropout(), width=4, keeps_scores=False) == 64 * whole
    assert kept(gelu_copies=6) - kept() == 6 * 8 * whole, "each a tensor of 4 h in half precision"


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@pytest.mark.parametrize("tp", [1, 4])
def test_products_add_up_to_the_operation_count(family, tp):
    model = MODEL.model_copy(update={"family": family, "vocab_size": 30592, "heads": 48})
    predictions = None if family == "gpt2" else 307
    layer = [*products.layer_products(model, B * S, tp), *products.attention_products(model, B * S, S, tp)]
    heads = products.head_products(model, B, S, 30592, tp, predictions)
    counted = tp * (48 * sum(p.operations for p in layer) + sum(p.operations for p in heads))
    if family == "bert":  # the masked-token head's dense layer is whole on every tensor rank
        counted -= (tp - 1) * heads[0].operations
    exact = cost.exact_flops_per_step(model, S, B, padded_vocab=30592, predictions=predictions) / 3
    assert counted == pytest.approx(exact, rel=1e-12)


def test_a_banded_layer_multiplies_its_band_alone():
    dense, banded = (
        sum(p.operations for p in products.attention_products(MODEL, S, S, 1, window))
        for window in (None, 256)
    )
    assert banded / dense == pytest.approx(cost.pairs(S, 256) / S**2)
