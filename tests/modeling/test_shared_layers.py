"""Layers that share the parameters of one: against layers of their own with the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from launching import WORKERS, run_ranks
from random_batch import random_batch
from torch import Tensor

from modeling import bert, cost, gpt2, transformer
from modeling.bert import BertShape
from modeling.cost import parameters
from modeling.families import conversion_of
from modeling.gpt2 import GPT2Shape
from modeling.hidden_dropout import dropout_seeds_of
from modeling.initialization import Init
from modeling.layer_list import Stack
from recipes import catalog
from recipes.schema import Model
from tools.tables.quantities import arithmetic, counts

LAYERS = 3
SIZES = dict(layers=LAYERS, hidden=32, heads=4, vocab=90, padded_vocab=90, positions=16)
SHAPES = {
    "gpt2": (gpt2.FAMILY, GPT2Shape(**SIZES)),
    "bert": (bert.FAMILY, BertShape(**SIZES, sentence_head="sop", post_norm=True)),
}


def both(family: str, **options) -> tuple[Stack, Stack]:
    """A model that shares, and one of layers of their own with copies of its parameters."""
    kind, shape = SHAPES[family]
    shape = replace(shape, **options)
    shared = kind.plain(replace(shape, shared_layers=True), group=None, init=Init(1, 0.3, LAYERS))
    given: dict[str, Tensor] = {}
    for p in shared.parameters():
        for i in range(LAYERS):
            given[p.canonical_name.replace("layers.0", f"layers.{i}")] = p.detach()
    return shared, kind.plain(shape, group=None, init=Init(1, 0.3, LAYERS, given=given))


@pytest.mark.parametrize("family", SHAPES)
def test_the_gradient_is_the_sum_over_the_uses(family):
    shared, own = both(family)
    batch = [*random_batch(SHAPES[family][0].fields, 2, 16, 5, 90).values()]
    losses = [
        outcome[0] if isinstance(outcome := model(*batch), tuple) else outcome for model in (shared, own)
    ]
    assert len(shared.layers) == 1 and torch.equal(*losses)
    for loss in losses:
        loss.backward()
    sums: dict[str, Tensor] = {}
    for p in own.parameters():
        head, _, rest = p.canonical_name.partition("layers.")
        name = f"layers.0.{rest.partition('.')[2]}" if rest and not head else p.canonical_name
        sums[name] = sums.get(name, 0) + p.grad
    found = {p.canonical_name: p.grad for p in shared.parameters()}
    assert found.keys() == sums.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, sums[name], rtol=1e-4, atol=1e-5)


def test_each_use_drops_elements_of_its_own(monkeypatch):
    """The first those of a layer that is not shared."""
    used, drop = [], transformer.HiddenDropout.forward

    def dropped(self, x: Tensor, dropout_seeds: Tensor) -> Tensor:
        used.append(dropout_seeds)
        return drop(self, x, dropout_seeds)

    monkeypatch.setattr(transformer.HiddenDropout, "forward", dropped)
    (shared, own), dropout_seeds = (
        both("gpt2", hidden_dropout=0.1),
        dropout_seeds_of(1, 0, torch.arange(2), 16),
    )
    tokens = torch.arange(32).view(2, 16)
    for model in (shared, own):
        model.train()(tokens, dropout_seeds=dropout_seeds)
    of_shared, of_own = used[: 1 + 2 * LAYERS], used[1 + 2 * LAYERS :]
    assert all(torch.equal(each, dropout_seeds) for each in (*of_own, *of_shared[:3]))
    different = {each.sum().item() for each in of_shared[1::2]}
    assert len(different) == LAYERS and all(map(torch.equal, of_shared[1::2], of_shared[2::2]))


@pytest.mark.parametrize("family", SHAPES)
def test_an_export_has_the_layer_for_each_use(family):
    """And its class computes the same."""
    model = Model(
        family=family, layers=LAYERS, hidden=32, heads=4, vocab_size=90, shared_layers=True,
        **({"layer_norm": "post", "sentence_head": "sop"} if family == "bert" else {}),
    )  # fmt: skip
    shared, conversion = both(family)[0].eval(), conversion_of(model)
    ours = {p.canonical_name: p.detach() for p in shared.parameters()}
    theirs = conversion.model_class(model)(conversion.config(model, 16)).eval()
    left = theirs.load_state_dict(conversion.to_transformers(ours, model), strict=False)
    assert {*left.missing_keys} <= conversion.tied.keys() and not left.unexpected_keys
    tokens, mask = torch.arange(32).view(2, 16), torch.ones(2, 16, dtype=torch.bool)
    with torch.no_grad():
        if family == "gpt2":
            found = (shared(tokens)[mask],)
        else:
            logits, sentence = shared(tokens, torch.zeros_like(tokens), None, None)
            found = (logits[mask], sentence)
        for mine, other in zip(
            found, conversion.logits(theirs, tokens, torch.zeros_like(tokens), mask), strict=True
        ):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "tp", "pp"), [("default/sotu", 1, 1), ("default/sotu", 2, 3), ("bert/sotu", 1, 2)]
)
def test_parameters_are_counted_once_a_stage_and_operations_for_every_layer(name, tp, pp):
    settings = [f"parallel.tp={tp}", f"parallel.pp={pp}"]
    recipe, own = (catalog.load(name, [*settings, *more]) for more in (["model.shared_layers=true"], []))
    model, positions = recipe.model, recipe.positions
    assert counts(recipe) == arithmetic(recipe)
    each = 12 * model.hidden**2 + 13 * model.hidden
    assert parameters(own.model, positions) - parameters(model, positions) == (model.layers - 1) * each
    assert cost.tflops(recipe, 509, 4, 1.0, 1) == cost.tflops(own, 509, 4, 1.0, 1)


LAYOUTS = {  # name: (processes, layout, from the last checkpoint of which)
    "whole": (1, {"ds_config": "zero0"}, None),
    "pipeline": (2, {"ds_config": "pipeline", "pp": 2, "settings": ["activation_checkpointing=full"]}, None),
    "zero2": (2, {"ds_config": "zero2", "dp": 2, "settings": ["activation_checkpointing=full"]}, None),
    "zero3": (2, {"ds_config": "zero3", "dp": 2}, "pipeline"),
    "tensor": (2, {"ds_config": "zero1", "tp": 2, "settings": ["parallel.sequence=true"]}, "zero2"),
    "whole again": (1, {"ds_config": "zero1"}, "zero3"),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", ["default/sotu", "bert/sotu"])
def test_layouts_train_the_same_and_go_on_from_each_other(name, tmp_path):
    """With dropout; gradients of the copies on several stages are summed, and recomputation adds to none."""
    # Without a warm-up from 0, so that the second loss shows the first gradient.
    settings = ("model.shared_layers=true", "dropout={hidden: 0.1, attention: 0}", "optimizer.eps=1e-6")
    settings += ("schedule.warmup_steps=0",)
    steps = {"whole": 6, "pipeline": 2, "zero2": 2, "zero3": 4, "tensor": 4, "whole again": 6}

    def job(layout: str) -> dict:
        _, case, source = LAYOUTS[layout]
        if source:
            source = str(tmp_path / source / "checkpoints" / f"step-{steps[source]:06}")
        case = {**case, "recipe": name, "settings": (*settings, *case.get("settings", ()))}
        return {"out": str(tmp_path / layout), "case": case, "steps": steps[layout], "source": source}

    jobs = {layout: job(layout) for layout in LAYOUTS}
    two = ["pipeline", "zero2", "zero3", "tensor"]
    for processes, layouts in ((1, ["whole"]), (2, two), (1, ["whole again"])):
        file = tmp_path / "jobs.json"
        file.write_text(json.dumps([jobs[each] for each in layouts]))
        launched = run_ranks(processes, WORKERS / "any_layout.py", file, timeout=300)
        assert launched.returncode == 0, launched.stdout[-4000:]
    losses = {each: json.loads((tmp_path / each / "losses.json").read_text()) for each in LAYOUTS}
    whole = losses.pop("whole")
    assert len(whole) == 6 and [*losses["zero3"]] == ["3", "4"], losses
    for layout, found in losses.items():
        assert max(abs(loss - whole[step]) for step, loss in found.items()) < 2e-6, (layout, found, whole)
