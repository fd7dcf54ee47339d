"""BERT to and from `transformers`: round trips, equal logits of all placements and heads, and refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from their_bert import LENGTHS, REAL, random_input, their_bert
from torch.testing import assert_close

from modeling.families import whole_model
from modeling.formats.huggingface import bert
from modeling.formats.huggingface.bert import CONVERSION
from modeling.formats.huggingface.weight_files import read_state_dict
from modeling.unpadding import row_of
from recipes.schema import Dropout, Recipe

to_canonical = CONVERSION.to_canonical
FORMS = list(itertools.product(("post", "pre"), ("nsp", "sop", "none")))


def recipe(layer_norm: str, sentence_head: str) -> Recipe:
    return Recipe.model_validate(dict(
        title="test", sequence_length=16, steps=10, batch={"global": 4}, optimizer={"lr": 1e-3},
        model=dict(
            family="bert", layers=3, hidden=32, heads=4, vocab_size=83,
            layer_norm=layer_norm, sentence_head=sentence_head,
        ),
        data={"tokenizer": {"kind": "trained_wordpiece"}},
    ))  # fmt: skip


def both_logits(wanted: Recipe, weights, model: torch.nn.Module):
    """Logits of our model with `weights`, and of transformers' model; ours without padding are the same.

    Each ((tokens, V) where not padding, (B, 2) or None).
    """
    tokens, types = random_input()
    with torch.no_grad():
        ours = whole_model(wanted, weights)
        logits, sentence = ours(tokens, types, LENGTHS)
        indices, row = row_of(LENGTHS, 16)
        in_a_row, of_a_row = ours(*(each.flatten()[indices][None] for each in (tokens, types)), row)
        assert_close(in_a_row[0, : LENGTHS.sum()], logits[REAL])
        assert_close(of_a_row, sentence)
        done = model(tokens, attention_mask=REAL.long(), token_type_ids=types)
    if wanted.model.sentence_head == "none":
        return (logits[..., :83][REAL], sentence), (done.logits[REAL], None)
    return (logits[..., :83][REAL], sentence), (done.prediction_logits[REAL], done.seq_relationship_logits)


@pytest.mark.parametrize(("layer_norm", "sentence_head"), FORMS)
def test_logits_are_equal_with_padding_and_the_round_trip_is_exact(layer_norm, sentence_head):
    wanted = recipe(layer_norm, sentence_head)
    model = their_bert(wanted)
    state = model.state_dict()
    ours = to_canonical(state, wanted.model)
    mine, other = both_logits(wanted, ours, model)
    assert mine[0].abs().max() > 1, "logits that differ between tokens"
    assert_close(mine[0], other[0], rtol=1e-4, atol=1e-4)
    assert (mine[1] is None) == (sentence_head == "none")
    if mine[1] is not None:
        assert_close(mine[1], other[1], rtol=1e-4, atol=1e-4)

    back = CONVERSION.to_transformers(ours, wanted.model)
    assert set(state) - set(back) == CONVERSION.tied.keys()
    assert all(torch.equal(back[name], state[name]) for name in back)
    again = to_canonical(back, wanted.model)
    assert again.keys() == ours.keys() and all(torch.equal(again[name], ours[name]) for name in ours)


@pytest.mark.parametrize("layer_norm", ["post", "pre"])
def test_gradients_of_both_losses_are_equal(layer_norm):
    """Equal logits say nothing of what is cut off, or no longer tied."""
    wanted = recipe(layer_norm, "nsp")
    model = their_bert(wanted)
    model.get_input_embeddings().padding_idx = None
    ours = whole_model(wanted, to_canonical(model.state_dict(), wanted.model))
    tokens, types = random_input()
    places, words = torch.tensor([[3, 14], [8, 2], [0, 0]]), torch.tensor([[5, 6], [7, 8], [9, 9]])
    weights, sentences = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]) / 5, torch.tensor([0, 1, 1])
    given = tokens, types, LENGTHS, places, words, weights, sentences, torch.full((3,), 1 / 3)
    ours(*given)[0].backward()
    labels = torch.full_like(tokens, -100).scatter(1, places, words)
    targets = {"labels": labels, "next_sentence_label": sentences}
    model(tokens, attention_mask=REAL.long(), token_type_ids=types, **targets).loss.backward()
    expected = to_canonical({name: p.grad for name, p in model.named_parameters()}, wanted.model)
    for parameter in ours.parameters():
        right = expected[parameter.canonical_name]
        assert_close(parameter.grad[: len(right)], right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("layer_norm", "sentence_head"), FORMS)
def test_names_are_those_of_our_model(layer_norm, sentence_head):
    wanted = recipe(layer_norm, sentence_head)
    ours = to_canonical(their_bert(wanted).state_dict(), wanted.model)
    module = whole_model(wanted, ours)
    assert {parameter.canonical_name for parameter in module.parameters()} == set(ours)


@pytest.mark.parametrize(("layer_norm", "sentence_head"), [("post", "nsp"), ("pre", "none")])
def test_what_we_write_transformers_loads_and_we_read_again(layer_norm, sentence_head, tmp_path):
    wanted = recipe(layer_norm, sentence_head)
    ours = to_canonical(their_bert(wanted).state_dict(), wanted.model)
    kind = CONVERSION.model_class(wanted.model)
    model = kind(bert.config(wanted.model, positions=wanted.sequence_length))
    left = model.load_state_dict(CONVERSION.to_transformers(ours, wanted.model), strict=False)
    assert set(left.missing_keys) == CONVERSION.tied.keys() and not left.unexpected_keys
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path).eval()
    mine, other = both_logits(wanted, ours, loaded)
    assert_close(mine[0], other[0], rtol=1e-4, atol=1e-4)
    found = to_canonical(read_state_dict(tmp_path), wanted.model)
    assert found.keys() == ours.keys() and all(torch.equal(found[name], ours[name]) for name in ours)


def test_settings_are_those_our_model_computes_with():
    for layer_norm, model_type in (("post", "bert"), ("pre", "megatron-bert")):
        config = bert.config(recipe(layer_norm, "nsp").model, 16, Dropout(hidden=0.1, attention=0.2))
        assert (config.model_type, config.hidden_act, config.layer_norm_eps, config.intermediate_size) == (
            model_type,
            "gelu",
            1e-12,
            128,
        )
        assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.2)


def test_a_bare_encoder_is_read_without_heads():
    wanted = recipe("post", "nsp")
    found = to_canonical(their_bert(wanted, transformers.BertModel).state_dict(), wanted.model)
    assert {entry.ours for entry in bert.name_map(wanted.model)} - set(found) == {
        "head.transform.weight", "head.transform.bias", "head.norm.weight", "head.norm.bias",
        "head.sentence.weight", "head.sentence.bias",
        "decoder_bias.bias",
    }  # fmt: skip


def test_old_checkpoints_and_unused_heads_are_read():
    wanted = recipe("post", "nsp")
    state = their_bert(wanted).state_dict()
    expected = to_canonical(state, wanted.model)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for name, t in state.items()
    }
    # transformers may save either name of a tied tensor.
    old |= {"bert.embeddings.position_ids": torch.arange(16)[None]}
    del old["cls.predictions.bias"], old["bert.embeddings.word_embeddings.weight"]
    found = to_canonical(old, wanted.model)
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
    without = to_canonical(state, recipe("post", "none").model)
    assert set(expected) - set(without) == {
        f"head.{m}.{leaf}" for m in ("pooler", "sentence") for leaf in ("weight", "bias")
    }
